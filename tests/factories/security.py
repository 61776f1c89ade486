"""The secret that the clusters of the tests share, and a secret that they do not know."""

from baton.system.curve import ClusterSecret, derive_fleet_keys, derive_keys

SECRET = ClusterSecret("what every test knows")
KEYS = derive_keys(SECRET)
FLEET_KEYS = derive_fleet_keys(SECRET)
OTHER_SECRET = ClusterSecret("what no test should know")
OTHER_KEYS = derive_keys(OTHER_SECRET)
