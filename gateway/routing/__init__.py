"""Which workers a request goes to: pure logic over the workers' own reports, which a simulator can run."""
