"""`rose calibrate`: a plain folder becomes one whose products run on 8-bit codes, as far as its answers allow it.

Inputs of every layer are watched over real texts, each layer is tried alone, and those that hurt most stay as they are
until the gate holds on texts that were held out. Written as compressed-tensors, which other engines load too. Knows
token ids and models; knows neither texts nor tokenizers.
"""

from rose.convert.calibrate.run import Outcome, Settings, calibrate
from rose.convert.calibrate.subject import Subject, Verdict, open_subject
from rose.convert.calibrate.targets import SCHEMES

__all__ = ["SCHEMES", "Outcome", "Settings", "Subject", "Verdict", "calibrate", "open_subject"]
