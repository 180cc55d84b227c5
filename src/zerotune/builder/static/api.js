// Requests to the server. Every failure becomes an ApiError with the server's answer.

export class ApiError extends Error {
  constructor(status, data) {
    super(data.error || `The server answered with status ${status}.`);
    this.status = status;
    this.data = data;
  }
}

async function answer(request) {
  let response;
  try {
    response = await request;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { error: "The builder does not answer. Check that it is still running." });
  }
  let data = {};
  try {
    data = await response.json();
  } catch {
    data = { error: `The server answered with status ${response.status}, but not with JSON.` };
  }
  if (!response.ok) throw new ApiError(response.status, data);
  return data;
}

const send = (path, options) => answer(fetch(`${document.body.dataset.prefix}/api${path}`, options));

export const get = (path) => send(path);
export const post = (path, body, signal) => send(path, {
  method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });
