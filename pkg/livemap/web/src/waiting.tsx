// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

import { useEffect, useRef, useState } from 'preact/hooks';
import * as api from './api';
import { GPUDetails } from './details';
import { inOrder } from './model';
import type { Store } from './store';
import { age, count } from './text';
import type { Line, Waiting } from './types';

/** How many pods are listed: with more of them the first ones and the search matter. */
const most = 200;

/** The GPU that is pinned, and the pods that wait. */
export function Side({ store }: { store: Store }) {
  const words = store.filter.text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => word.replace(/^pod:/, ''));
  const all = inOrder(store.shown.pods.values());
  const found = all.filter((pod) => words.every((word) => `${pod.namespace}/${pod.name}`.toLowerCase().includes(word)));
  // Words are for GPUs first: they leave no pod out if they are about no pod.
  const pods = found.length > 0 ? found : all;
  return (
    <aside class="side" id="side" aria-label="Details and waiting pods">
      <Pinned store={store} />
      <section aria-labelledby="waiting">
        <h2 id="waiting">
          Waiting <span class="quiet">{count(all.length, 'pod')}</span>
        </h2>
        {store.status.missing?.some((m) => m.resource === 'pods') && <p class="note">You may not list or watch pods.</p>}
        {all.length === 0 && <p class="quiet">No pod waits for devices.</p>}
        <ul class="pods">
          {pods.slice(0, most).map((pod) => (
            <PodView key={pod.namespace + '/' + pod.name} pod={pod} store={store} />
          ))}
        </ul>
        {pods.length > most && <p class="quiet">and {count(pods.length - most, 'more pod')}; the search finds them</p>}
      </section>
    </aside>
  );
}

function Pinned({ store }: { store: Store }) {
  const gpu = store.pinnedGPU();
  const heading = useRef<HTMLHeadingElement>(null);
  const key = store.pinned && store.pinned.node + store.pinned.key;
  useEffect(() => {
    if (key) heading.current?.focus();
  }, [key]);
  if (!store.pinned) return null;
  const close = () => {
    store.pin(null);
    document.querySelector<HTMLElement>('.gpu[tabindex="0"]')?.focus();
  };
  return (
    <section
      class="pinned"
      aria-labelledby="pinned"
      onKeyDown={(event) => {
        if (event.key === 'Escape') close();
      }}
    >
      <h2 id="pinned" ref={heading} tabIndex={-1}>
        {store.pinned.node === '*' ? 'network-attached' : store.pinned.node}
        <button type="button" class="icon" aria-label="Close the details" onClick={close}>
          ×
        </button>
      </h2>
      {gpu ? <GPUDetails gpu={gpu} /> : <p class="quiet">It is not there {store.past ? 'at that time' : 'any more'}.</p>}
    </section>
  );
}

type Answer = { state: 'asked' } | { state: 'told'; lines: Line[] } | { state: 'failed'; text: string };

function PodView({ pod, store }: { pod: Waiting; store: Store }) {
  const [answer, setAnswer] = useState<Answer | null>(null);
  const abort = useRef<AbortController | null>(null);
  useEffect(() => () => abort.current?.abort(), []);
  const ask = () => {
    abort.current?.abort();
    const control = (abort.current = new AbortController());
    setAnswer({ state: 'asked' });
    api.why(pod.namespace, pod.name, control.signal).then(
      (lines) => setAnswer({ state: 'told', lines }),
      (error: Error) => {
        if (!control.signal.aborted) setAnswer({ state: 'failed', text: error.message });
      },
    );
  };
  const past = store.past !== null;
  return (
    <li class="pod" data-pod={pod.namespace + '/' + pod.name}>
      <p class="who">
        <span>
          <span class="quiet">{pod.namespace}/</span>
          <b>{pod.name}</b>
        </span>
        <time dateTime={pod.created} title={'made at ' + pod.created}>
          {age((store.past ? store.past.time : store.now()) - Date.parse(pod.created))}
        </time>
      </p>
      <p class="asks">
        {pod.asks.join(', ')}
        {pod.group && <span class="quiet"> in group {pod.group}</span>}
        {pod.priority ? <span class="quiet"> priority {pod.priority}</span> : null}
      </p>
      {pod.node ? (
        <p class="quiet">has node {pod.node}; its containers are not running yet</p>
      ) : (
        pod.message && <p class="message">{pod.message}</p>
      )}
      {!past && (
        <button type="button" class="why" aria-expanded={answer !== null} onClick={() => (answer ? setAnswer(null) : ask())}>
          {answer ? 'Hide' : 'Why?'}
          <span class="hidden"> {pod.namespace + '/' + pod.name}</span>
        </button>
      )}
      {answer && !past && (
        <div class="answer" role="status" aria-busy={answer.state === 'asked'}>
          {answer.state === 'asked' && <p class="quiet">Trying the pod on a copy of the cluster…</p>}
          {answer.state === 'failed' && <p class="note">{answer.text}</p>}
          {answer.state === 'told' &&
            answer.lines.map((line, i) => (
              <p key={i} class={line.indent ? 'indented' : line.text.endsWith(':') ? 'heading' : ''}>
                {line.text}
              </p>
            ))}
        </div>
      )}
    </li>
  );
}
