"""Use the trained network of a run: predictions and their pictures, export, flatness."""

from ..tasks.exported import Comparison as Comparison
from ..tasks.found import FoundClasses as FoundClasses
from ..tasks.found import FoundJoints as FoundJoints
from ..tasks.found import FoundValues as FoundValues
from ..tasks.found import Prediction as Prediction
from .predictions import predict as predict
from .run_export import ExportedNetwork as ExportedNetwork
from .run_export import export_run as export_run
