"""The network lab: hosts as network namespaces on one machine, with NICs of a chosen speed."""

from tilewise.tools.lab.lab import Lab
from tilewise.tools.lab.leftovers import clean
from tilewise.tools.lab.site import LabError, NicTraffic, Site

__all__ = ["Lab", "LabError", "NicTraffic", "Site", "clean"]
