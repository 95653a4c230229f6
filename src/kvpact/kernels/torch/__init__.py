"""The torch bodies: they define what every other backend computes."""
