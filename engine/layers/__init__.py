"""The layers that models are made of; knows no architecture."""
