"""Search for better kernel configurations on the present GPU, and write them to the tables."""
