"""Use the trained network of a run: predictions on image files, and export."""

from .export import ExportedNetwork as ExportedNetwork
from .export import export_run as export_run
from .pose_prediction import FoundJoints as FoundJoints
from .pose_prediction import find_joints as find_joints
from .prediction import Prediction as Prediction
from .prediction import predict as predict
