// The form's state: a plain DeepSpeed configuration, launch settings and what is planned for.
// Nothing here knows what a key means; that is the server's.

export const state = { config: {}, launch: {}, setup: {} };

const listeners = [];
export const onChange = (listener) => listeners.push(listener);
export const changed = (source) => listeners.forEach((listener) => listener(source));

export function read(store, path) {
  let here = state[store];
  for (const name of path.split(".")) {
    if (here === null || typeof here !== "object" || !Object.hasOwn(here, name)) return undefined;
    here = here[name];
  }
  return here;
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

export function write(store, path, value) {
  if (value === undefined) return remove(state[store], path.split("."));
  const names = path.split(".");
  const last = names.pop();
  let here = state[store];
  for (const name of names) {
    if (!Object.hasOwn(here, name) || !isObject(here[name])) here[name] = {};
    here = here[name];
  }
  Object.defineProperty(here, last, { value, writable: true, enumerable: true, configurable: true });
}

// A section that becomes empty goes with its last key: an empty one means something else.
function remove(here, [name, ...rest]) {
  if (!isObject(here) || !Object.hasOwn(here, name)) return;
  if (rest.length) {
    remove(here[name], rest);
    if (isObject(here[name]) && Object.keys(here[name]).length === 0) delete here[name];
  } else {
    delete here[name];
  }
}

// A key keeps its place among its neighbours under another name.
export function rename(store, path, to) {
  const value = read(store, path);
  const [section, target] = [path, to].map((each) => each.split(".").slice(0, -1).join("."));
  if (section === target) state[store] = renamed(state[store], path.split("."), to.split(".").at(-1));
  else {
    write(store, path, undefined);
    write(store, to, value);
  }
}

const renamed = (here, [name, ...rest], to) => rest.length
  ? { ...here, [name]: renamed(here[name], rest, to) }
  : Object.fromEntries(Object.entries(here).map(([key, item]) => [key === name ? to : key, item]));

export function replace(next) {
  for (const store of ["config", "launch", "setup"]) {
    state[store] = structuredClone(next[store] ?? {});
  }
}

// What is typed is JSON where it can be, else text; whole numbers that JavaScript would round are
// kept as their digits.
export function parse(text) {
  const plain = text.trim();
  if (plain === "") return undefined;
  if (/^-?\d+$/.test(plain) && !Number.isSafeInteger(Number(plain))) return { $int: plain };
  try {
    return JSON.parse(plain);
  } catch {
    return plain;
  }
}

export function print(value) {
  if (value === undefined) return "";
  if (typeof value === "string") {
    // Text that would be read as something else keeps its quotes.
    return typeof parse(value) === "string" ? value : JSON.stringify(value);
  }
  if (isObject(value) && Object.hasOwn(value, "$int")) return value.$int;
  return JSON.stringify(value);
}

export const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
