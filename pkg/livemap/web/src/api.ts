// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

import type { Change, Line, Status, Title } from './types';

const kept = 'token';

/** An answer of the server that is an error. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    text: string,
  ) {
    super(text);
  }
}

/** Takes the secret out of the address, so that nobody copies it with the address; a reload finds it in the tab's storage. */
export async function signIn(): Promise<void> {
  const given = new URLSearchParams(location.hash.slice(1));
  history.replaceState(null, '', location.pathname);
  const token = given.get('token');
  const code = given.get('code');
  if (token) {
    sessionStorage.setItem(kept, token);
  } else if (code) {
    const response = await fetch('api/session', { method: 'POST', body: JSON.stringify({ code }) });
    if (response.ok) sessionStorage.setItem(kept, ((await response.json()) as { token: string }).token);
    else if (!sessionStorage.getItem(kept)) throw await refused(response);
  }
}

async function refused(response: Response): Promise<Refused> {
  return new Refused(response.status, (await response.text()).trim() || response.statusText);
}

async function get(path: string, signal?: AbortSignal, headers: Record<string, string> = {}): Promise<Response> {
  const response = await fetch('api/' + path, {
    headers: { ...headers, Authorization: 'Bearer ' + (sessionStorage.getItem(kept) ?? '') },
    signal: signal ?? null,
    cache: 'no-store',
  });
  if (!response.ok) throw await refused(response);
  return response;
}

export async function at(time: number, from: number): Promise<Change> {
  return parse<Change>(await (await get(`at?time=${Math.round(time)}&from=${from}`)).text());
}

export async function why(namespace: string, pod: string, signal: AbortSignal): Promise<Line[]> {
  const query = new URLSearchParams({ namespace, pod });
  return parse<{ lines: Line[] }>(await (await get('why?' + query, signal)).text()).lines;
}

export interface Listener {
  title(title: Title): void;
  status(status: Status): void;
  change(change: Change): void;
  /** The stream is open, with how far the server's clock is ahead, in milliseconds. */
  open(ahead: number): void;
  lost(): void;
  /** It is of no use to go on. */
  refused(error: Refused): void;
}

/** How long nothing may come. The server sends something every 15 s. */
const silence = 40_000;

/** Too many Requests: the user has other pages open, which may be closed. */
const tooMany = 429;

/** Follows the stream until the server refuses it. EventSource would do the same, but sends no headers. */
export async function follow(to: Listener, version: () => number): Promise<void> {
  for (let pause = 250; ; pause = Math.min(2 * pause, 5000)) {
    const abort = new AbortController();
    let timer = setTimeout(() => abort.abort(), silence);
    let refused = false;
    try {
      const last = version();
      const response = await get('stream', abort.signal, last > 0 ? { 'Last-Event-ID': String(last) } : {});
      to.open(Date.parse(response.headers.get('Date') ?? '') - Date.now() || 0);
      pause = 250;
      const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
      let text = '';
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        clearTimeout(timer);
        timer = setTimeout(() => abort.abort(), silence);
        let from = Math.max(0, text.length - 1);
        text += value;
        for (let end; (end = text.indexOf('\n\n', from)) >= 0; from = 0) {
          dispatch(text.slice(0, end), to);
          text = text.slice(end + 2);
        }
      }
    } catch (error) {
      if (error instanceof Refused && error.status < 500) {
        refused = true;
        to.refused(error);
        if (error.status !== tooMany) return;
      }
    } finally {
      clearTimeout(timer);
      abort.abort();
    }
    if (!refused) to.lost();
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

/** Characters that change the order or the place of others: names in a snapshot file may have them. */
const unruly = /[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** Parses JSON. Unruly characters, which are rare, are replaced. */
function parse<T>(json: string): T {
  if (json.search(unruly) < 0 && !json.includes('\\u00')) return JSON.parse(json) as T;
  return JSON.parse(json, (_, value: unknown) => (typeof value === 'string' ? value.replace(unruly, '\ufffd') : value)) as T;
}

function dispatch(event: string, to: Listener): void {
  let name = '';
  let data = '';
  for (const line of event.split('\n')) {
    if (line.startsWith('event: ')) name = line.slice(7);
    else if (line.startsWith('data: ')) data = line.slice(6);
  }
  switch (name) {
    case 'title':
      return to.title(parse<Title>(data));
    case 'status':
      return to.status(parse<Status>(data));
    case 'change':
      return to.change(parse<Change>(data));
  }
}
