// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

import { render } from 'preact';
import { useEffect, useReducer, useRef, useState } from 'preact/hooks';
import { Grid } from './grid';
import { Store, type Density } from './store';
import { count, number, stateWords } from './text';
import { Timeline } from './timeline';
import { states, type State } from './types';
import { Side } from './waiting';
import { Announcer } from './announce';
import { ThemeSwitch } from './theme';

const store = new Store();

function App() {
  const [, draw] = useReducer((n: number) => n + 1, 0);
  const [side, setSide] = useState(() => !matchMedia('(max-width: 860px)').matches);
  useEffect(() => {
    const stop = store.subscribe(() => draw(undefined));
    const clock = setInterval(() => draw(undefined), 5000); // ages, and the end of the timeline
    return () => {
      stop();
      clearInterval(clock);
    };
  }, []);
  useEffect(() => {
    if (store.pinned) setSide(true);
  }, [store.pinned]);
  return (
    <>
      <header>
        <h1>
          GPU map <span class="cluster">{store.title?.cluster}</span>
        </h1>
        <Connection />
        <span class="totals">
          {count(store.shown.gpus, 'GPU')} on {count(store.shown.nodes.size - (store.shown.nodes.has('*') ? 1 : 0), 'node')}
        </span>
        <span class="spring" />
        <ThemeSwitch />
        <button type="button" class="toggle" aria-expanded={side} aria-controls="side" onClick={() => setSide(!side)}>
          Waiting <b>{number(store.shown.pods.size)}</b>
        </button>
      </header>
      <Toolbar />
      <Notices />
      <main class={side ? 'with-side' : ''}>
        <Grid store={store} />
        {side && <Side store={store} />}
      </main>
      {store.title && !store.title.file && <Timeline store={store} />}
      <Announcer store={store} />
    </>
  );
}

function Connection() {
  const [text, kind] =
    store.connection === 'refused'
      ? ['refused', 'bad']
      : store.connection === 'lost'
        ? ['connecting again', 'warn']
        : store.connection === 'connecting' || !store.status.ready
          ? ['reading', 'warn']
          : store.status.unreachable
            ? ['API server not reachable', 'bad']
            : store.past
              ? ['as it was', 'warn']
              : store.title?.file
              ? ['snapshot of ' + new Date(store.title.taken ?? '').toLocaleString(), 'calm']
              : ['live', 'good'];
  return <span class={'connection ' + kind}>{text}</span>;
}

function Notices() {
  const notices: string[] = [];
  if (store.connection === 'refused') notices.push(store.refusal);
  if (store.connection === 'lost') notices.push('The command does not answer. What is shown may be old.');
  if (store.status.unreachable) notices.push('What is shown may be old. ' + store.status.unreachable);
  for (const missing of store.status.missing ?? []) notices.push(`${missing.resource} are left out: ${missing.reason}`);
  return (
    <div class="notices" role="alert">
      {notices.map((text) => (
        <p key={text}>{text}</p>
      ))}
    </div>
  );
}

function Toolbar() {
  const search = useRef<HTMLInputElement>(null);
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      const inField = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
      if (event.key === '/' && !inField) {
        event.preventDefault();
        search.current?.focus();
      }
    };
    document.addEventListener('keydown', onKey);
    return () => document.removeEventListener('keydown', onKey);
  }, []);
  const { filter, shown } = store;
  const toggle = (state: State) => {
    const chosen = new Set(filter.states);
    if (!chosen.delete(state)) chosen.add(state);
    store.setFilter({ states: chosen });
  };
  const models = [...shown.models.keys()].sort();
  return (
    <div class="toolbar" role="search">
      <input
        ref={search}
        type="search"
        placeholder="Search nodes, pods, models…  /"
        aria-label="Search nodes, pods, models, taints. node:, pod:, model: and state: say where."
        aria-keyshortcuts="/"
        spellcheck={false}
        value={filter.text}
        onInput={(event) => store.setFilter({ text: event.currentTarget.value })}
      />
      {models.length > 1 && (
        <select aria-label="Model" value={filter.model} onChange={(event) => store.setFilter({ model: event.currentTarget.value })}>
          <option value="">All models</option>
          {models.map((model) => (
            <option key={model} value={model}>
              {model}
            </option>
          ))}
        </select>
      )}
      <div class="states" role="group" aria-label="States">
        {states.map((state) => (
          <button
            key={state}
            type="button"
            class={'chip ' + state}
            aria-pressed={filter.states.has(state)}
            title={stateWords[state]}
            onClick={() => toggle(state)}
          >
            <span class={'swatch gpu ' + state} aria-hidden="true" />
            {state} <b data-count={state}>{number(shown.states.get(state) ?? 0)}</b>
          </button>
        ))}
      </div>
      <span class="spring" />
      <select
        aria-label="Size of cards"
        value={store.density}
        onChange={(event) => store.setDensity(event.currentTarget.value as Density)}
      >
        <option value="cards">Cards</option>
        <option value="compact">Compact</option>
      </select>
      <select
        aria-label="Order of nodes"
        value={store.order}
        onChange={(event) => store.set(() => (store.order = event.currentTarget.value as 'name' | 'free'))}
      >
        <option value="name">By name</option>
        <option value="free">Most free first</option>
      </select>
    </div>
  );
}

render(<App />, document.getElementById('app')!);
void store.start();
