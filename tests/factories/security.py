"""The secret that the tests' clusters share, and one that they do not know."""

from baton.curve import ClusterSecret, derive_keys

SECRET = ClusterSecret("what every test knows")
KEYS = derive_keys(SECRET)
OTHER_KEYS = derive_keys(ClusterSecret("what no test should know"))
