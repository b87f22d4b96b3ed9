// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

import { useEffect, useRef, useState } from 'preact/hooks';
import { cardsOf } from './cards';
import { isEverything, matcher } from './filter';
import type { Store } from './store';
import { clockText, count } from './text';
import { states, type State } from './types';

/** How often changes are told at most, in milliseconds: a screen reader reads each to its end. */
const rest = 8000;

/** Tells what changed to those who do not see it. */
export function Announcer({ store }: { store: Store }) {
  const [text, setText] = useState('');
  const told = useRef({ time: 0, states: new Map<State, number>(), pods: 0, version: 0 });
  const search = useRef({ filter: store.filter, timer: 0 });

  useEffect(() => {
    const past = told.current;
    const { live } = store;
    if (store.past || live.version === 0 || live.version === past.version || Date.now() - past.time < rest) return;
    const changes = states
      .filter((state) => (live.states.get(state) ?? 0) !== (past.states.get(state) ?? 0))
      .map((state) => `${live.states.get(state) ?? 0} ${state}`);
    if (live.pods.size !== past.pods) changes.push(`${count(live.pods.size, 'pod')} ${live.pods.size === 1 ? 'waits' : 'wait'}`);
    const first = past.version === 0;
    told.current = { time: Date.now(), states: new Map(live.states), pods: live.pods.size, version: live.version };
    if (first) setText(`${count(live.gpus, 'GPU')} on ${count(live.nodes.size, 'node')}: ${changes.join(', ')}`);
    else if (changes.length > 0) setText('Now ' + changes.join(', '));
  });

  useEffect(() => {
    if (search.current.filter === store.filter) return;
    search.current.filter = store.filter;
    clearTimeout(search.current.timer);
    search.current.timer = window.setTimeout(() => {
      const match = matcher(store.filter);
      const nodes = new Set(cardsOf(store.shown, match, 'name').map((card) => card.node)).size;
      setText(isEverything(store.filter) ? 'All nodes are shown' : `${count(nodes, 'node')} found`);
    }, 700);
  });

  useEffect(() => {
    if (store.past) setText('Shown is ' + clockText(store.past.time));
  }, [store.past?.version]);

  return (
    <p class="hidden" role="status" aria-live="polite">
      {text}
    </p>
  );
}
