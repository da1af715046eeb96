"""A scan that came as DICOM -> a structured report of its landmarks, which refers to its images."""

from collections.abc import Awaitable, Callable

from app.api.scans.reception import ReceivedScan
from app.io import SEARCH_BYTES, Evidence, LandmarksAnswer, find_evidence, load_report_writer


async def find_and_report(
    scan: ReceivedScan, find: Callable[[], Awaitable[LandmarksAnswer]]
) -> tuple[LandmarksAnswer, bytes]:
    """Find the landmarks of a scan, and report on them.

    Args:
        scan: The scan.
        find: Finds its landmarks; not called where no report can be written.

    Returns:
        The answer, and the report, which says nothing about the patient.

    Raises:
        UnknownFormat: The scan is not DICOM, its images cannot be referred to, or what writes
            reports is not installed.
        LandmarkdError: As ``find``.
    """

    def prepare(
        check_cancelled: Callable[[], None],
    ) -> tuple[Callable[[LandmarksAnswer, Evidence], bytes], Evidence]:
        limit, series = scan.engine.limits.inflated_bytes, scan.selection.series
        write = load_report_writer()
        return write, find_evidence(scan.upload.content, limit, series, check_cancelled)

    # Nothing of it is kept: who holds memory may not have all of it, which the scan may need.
    write, evidence = await scan.compute(prepare, SEARCH_BYTES, lambda _: 0)
    answer = await find()
    memory = evidence.report_bytes(len(answer.landmarks) + len(answer.measurements))
    return answer, await scan.compute(lambda _: write(answer, evidence), memory, len)
