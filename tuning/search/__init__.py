"""Search for better kernel configurations on the present GPU, and write them to the tables.

``space`` lists a kernel's configurations; ``survey`` compiles them and keeps those fit to run;
``trial`` runs and checks one; ``search`` finds each row's fastest; ``cases`` has each row's
problem; ``table`` edits the file.
"""
