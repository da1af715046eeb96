// Calls of the service. None leaves the page's own origin.

let key = "";

export function setKey(value) {
  key = value;
}

function headers(more = {}) {
  return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

/** A problem (problem+json) of the service, or an error in its place. */
export class Problem extends Error {
  constructor({ code, status = 0, title, detail, request_id = "" }) {
    super(detail);
    Object.assign(this, { code, status, title, detail, requestId: request_id });
  }
}

const unreachable = () =>
  new Problem({
    code: "unreachable",
    title: "No answer",
    detail: "The connection to the service was closed. The service may have stopped, or refused the upload.",
  });

function problemOf(text, status) {
  try {
    const problem = JSON.parse(text);
    if (problem.code) return new Problem(problem);
  } catch {
    // Such as the HTML of a proxy.
  }
  return new Problem({
    code: "unexpected", status, title: "Unexpected answer", detail: `Got HTTP status ${status}.`,
  });
}

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(options.headers) });
  } catch {
    throw unreachable();
  }
  if (!response.ok) throw problemOf(await response.text(), response.status);
  return response;
}

export async function getReadiness() {
  // 503 has the same body as 200.
  try {
    return await (await fetch("readyz", { headers: headers() })).json();
  } catch {
    return { ready: false, reason: "no answer" };
  }
}

/** All models, and whether the service keeps cases: {models, keeps_cases}. */
export async function listModels() {
  return (await request("v1/models")).json();
}

export async function getModel(name) {
  return (await request(`v1/models/${encodeURIComponent(name)}`)).json();
}

export async function generateScan(seed) {
  const scan = await (await request(`page/phantom.nii.gz?seed=${seed}`)).blob();
  return new File([scan], `phantom-${seed}.nii.gz`);
}

/** Convert an answer to another format, without sending its scan again. */
export async function convertAnswer(answer, format) {
  const options = { method: "POST", body: JSON.stringify(answer) };
  return (await request(`page/landmarks?format=${encodeURIComponent(format)}`, options)).blob();
}

/** Make the heatmap of a landmark; `query` names model and landmark, and maybe frame or series. */
export async function makeHeatmap(file, query, signal) {
  const headers = { "Content-Type": "application/octet-stream" };
  const options = { method: "POST", body: file, headers, signal };
  return (await request(`v1/heatmaps?${new URLSearchParams(query)}`, options)).blob();
}

/** Keep a scan with its answer, as corrected; `choice` is its frame or series. Return what is kept. */
export async function keepCase(file, answer, choice) {
  const body = new FormData();
  body.append("volume", file);
  body.append("answer", new Blob([JSON.stringify(answer)]));
  return (await request(`v1/cases?${new URLSearchParams(choice)}`, { method: "POST", body })).json();
}

/**
 * Send a scan; `onProgress` gets {stage: "upload", part} and the service's progress events.
 * XMLHttpRequest is used because fetch does not report the progress of an upload.
 */
export function findLandmarks(file, { model, frame, series, signal, onProgress }) {
  const query = new URLSearchParams({ model });
  if (frame !== undefined) query.set("frame", frame);
  if (series !== undefined) query.set("series", series);
  const upload = new XMLHttpRequest();
  upload.open("POST", `v1/landmarks?${query}`);
  const types = { Accept: "text/event-stream", "Content-Type": "application/octet-stream" };
  for (const [name, value] of Object.entries(headers(types))) upload.setRequestHeader(name, value);
  return new Promise((resolve, reject) => {
    let read = 0;
    const readEvents = () => {
      const end = upload.responseText.lastIndexOf("\n\n");
      if (upload.status !== 200 || end < read) return;
      const events = upload.responseText.slice(read, end).split("\n\n");
      read = end + 2;
      for (const event of events) {
        const [, name, data] = /^event: (.*)\ndata: (.*)$/.exec(event);
        if (name === "progress") onProgress(JSON.parse(data));
        else if (name === "answer") resolve(JSON.parse(data));
        else reject(new Problem(JSON.parse(data)));
      }
    };
    upload.upload.onprogress = ({ loaded, total }) => onProgress({ stage: "upload", part: loaded / total });
    upload.onprogress = readEvents;
    upload.onerror = () => reject(unreachable());
    upload.onabort = () => reject(signal.reason);
    upload.onload = () => {
      readEvents();
      // Has no effect after an answer.
      reject(upload.status === 200 ? unreachable() : problemOf(upload.responseText, upload.status));
    };
    signal.addEventListener("abort", () => upload.abort());
    upload.send(file);
  });
}
