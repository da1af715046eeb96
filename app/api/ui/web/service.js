// What the page asks of the service. No call leaves the page's own origin.

let key = "";

export function useKey(given) {
  key = given;
}

function headers(more = {}) {
  return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

/** What went wrong, as the service says it (problem+json) or as close to that as can be told. */
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
    detail: "The connection to the service broke off. It may have stopped, or refused the upload.",
  });

function problemOf(text, status) {
  try {
    const problem = JSON.parse(text);
    if (problem.code) return new Problem(problem);
  } catch {
    // Such as the HTML of a proxy in between.
  }
  return new Problem({
    code: "unexpected", status, title: "Unexpected answer", detail: `Got HTTP status ${status}.`,
  });
}

async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(options.headers) });
  } catch {
    throw unreachable();
  }
  if (!response.ok) throw problemOf(await response.text(), response.status);
  return response;
}

export async function readiness() {
  // 503 has the same body as 200: the reason.
  try {
    return await (await fetch("readyz")).json();
  } catch {
    return { ready: false, reason: "no answer" };
  }
}

export async function listModels() {
  return (await (await ask("v1/models")).json()).models;
}

export async function generateScan(seed) {
  const scan = await (await ask(`page/phantom.nii.gz?seed=${seed}`)).blob();
  return new File([scan], `phantom-${seed}.nii.gz`);
}

/** Write an answer as another format; its scan need not be sent again. */
export async function writeAs(answer, format) {
  const options = { method: "POST", body: JSON.stringify(answer) };
  return (await ask(`page/landmarks?format=${encodeURIComponent(format)}`, options)).blob();
}

/**
 * Send a scan; `tell` hears of {stage: "upload", part} and of the service's own progress events.
 * XMLHttpRequest rather than fetch, which does not tell how far an upload is.
 */
export function findLandmarks(file, { model, frame, signal, tell }) {
  const query = new URLSearchParams({ model });
  if (frame !== undefined) query.set("frame", frame);
  const request = new XMLHttpRequest();
  request.open("POST", `v1/landmarks?${query}`);
  const wanted = { Accept: "text/event-stream", "Content-Type": "application/octet-stream" };
  for (const [name, value] of Object.entries(headers(wanted))) request.setRequestHeader(name, value);
  return new Promise((resolve, reject) => {
    let read = 0;
    const listen = () => {
      const end = request.responseText.lastIndexOf("\n\n");
      if (request.status !== 200 || end < read) return;
      const events = request.responseText.slice(read, end).split("\n\n");
      read = end + 2;
      for (const event of events) {
        const [, name, data] = /^event: (.*)\ndata: (.*)$/.exec(event);
        if (name === "progress") tell(JSON.parse(data));
        else if (name === "answer") resolve(JSON.parse(data));
        else reject(new Problem(JSON.parse(data)));
      }
    };
    request.upload.onprogress = ({ loaded, total }) => tell({ stage: "upload", part: loaded / total });
    request.onprogress = listen;
    request.onerror = () => reject(unreachable());
    request.onabort = () => reject(signal.reason);
    request.onload = () => {
      listen();
      // After an answer this changes nothing.
      reject(request.status === 200 ? unreachable() : problemOf(request.responseText, request.status));
    };
    signal.addEventListener("abort", () => request.abort());
    request.send(file);
  });
}
