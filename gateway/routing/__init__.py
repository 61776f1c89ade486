"""Which workers a request goes to: pure logic over what workers say of themselves, so that a simulation can run it."""
