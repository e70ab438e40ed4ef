"""What is measured: each suite's jobs, and the table that its numbers go into."""
