"""The door of a fleet that has no gateway of its own: whoever knows the cluster's secret asks its controller here."""
