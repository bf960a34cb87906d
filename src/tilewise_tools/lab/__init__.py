"""The network lab: hosts as network namespaces on one machine, with NICs of a chosen speed."""

from tilewise_tools.lab.lab import Lab as Lab
from tilewise_tools.lab.lab import clean as clean
from tilewise_tools.lab.site import LabError as LabError
from tilewise_tools.lab.site import NicTraffic as NicTraffic
from tilewise_tools.lab.site import Site as Site
