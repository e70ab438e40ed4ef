"""Search for better kernel configurations on the present GPU, and write them to the tables.

``space`` lists the configurations of a kernel; ``survey`` compiles them without launching and
keeps those fit to run; ``trial`` checks one at work; ``search`` goes through rows and finds the
fastest; ``cases`` has the problem that stands for a row; ``table`` edits the file; ``command`` is
``python -m tuning search``.
"""
