"""Use the trained network of a run: predictions on image files, and export."""

from .class_prediction import Prediction as Prediction
from .class_prediction import predict as predict
from .pose_prediction import FoundJoints as FoundJoints
from .pose_prediction import find_joints as find_joints
from .run_export import ExportedNetwork as ExportedNetwork
from .run_export import export_run as export_run
