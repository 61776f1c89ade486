"""Chooses the workers of each request: pure logic over the workers' own reports, which a simulator can run."""
