"""The cluster in virtual time: world, network, devices, workers, gateways; runs the real decisions, knows no torch."""
