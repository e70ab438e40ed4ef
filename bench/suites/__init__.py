"""The suites: each module lists the jobs of one."""
