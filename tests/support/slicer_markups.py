"""The part of 3D Slicer's Markups schema, version 1.0.3, that landmarkd writes."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

Number = Annotated[float, Field(allow_inf_nan=False)]


class Part(BaseModel):
    """An object with the keys and types of the schema, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class ControlPoint(Part):
    """One point; Slicer reads no position if it is undefined."""

    id: str = ""
    label: str = ""
    description: str = ""
    associated_node: Annotated[str, Field(alias="associatedNodeID")] = ""
    position: Annotated[list[Number], Field(min_length=3, max_length=3)] | None = None
    orientation: Annotated[list[Number], Field(min_length=9, max_length=9)] | None = None
    selected: bool = True
    locked: bool = False
    visibility: bool = True
    position_status: Literal["undefined", "preview", "defined"] = "defined"

    @model_validator(mode="after")
    def has_a_position_if_defined(self) -> "ControlPoint":
        """Check what the schema does not: a position if and only if it is defined."""
        if (self.position_status == "defined") != (self.position is not None):
            raise ValueError(f"expected a position of what is defined alone, got {self}")
        return self


class Measurement(Part):
    """A number, or one for each point."""

    name: str = ""
    enabled: bool = True
    value: Number | None = None
    units: str = ""
    description: str = ""
    print_format: str = ""
    control_point_values: list[Number] = []


class Markup(Part):
    """A list of points."""

    type: Literal["Fiducial", "Line", "Angle", "Curve", "ClosedCurve", "Plane", "ROI"]
    name: str = ""
    coordinate_system: Literal["LPS", "RAS"] = "LPS"
    coordinate_units: Literal["mm", "um"] = "mm"
    locked: bool = True
    fixed_number_of_control_points: bool = False
    label_format: str = "%N-%d"
    last_used_control_point_number: int = 0
    control_points: list[ControlPoint] = []
    measurements: list[Measurement] = []


class MarkupsFile(Part):
    """A whole file."""

    schema_url: Annotated[str, Field(alias="@schema", pattern=r"/markups-schema-v1\.0\.3\.json#$")]
    markups: list[Markup]
