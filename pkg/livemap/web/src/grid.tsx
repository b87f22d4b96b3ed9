// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from 'preact/hooks';
import { cardsOf, layout, rowsBetween, sizes } from './cards';
import { CardView } from './cell';
import { GPUDetails } from './details';
import { isEverything, matcher } from './filter';
import { keyOf, type Store } from './store';
import { count } from './text';
import type { GPU } from './types';

/** How far beyond the window rows are drawn, in pixels, so that a fast scroll meets no emptiness. */
const beyond = 300;

interface Place {
  card: number;
  at: number;
}

/** All nodes. Only the rows of cards in the window are drawn, and the one that the keyboard is at. */
export function Grid({ store }: { store: Store }) {
  const box = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, width: 0, height: 0 });
  const [current, setCurrent] = useState<{ node: string; key: string } | null>(null);
  const [pointed, setPointed] = useState<Place | null>(null);
  const [focused, setFocused] = useState(false);
  const takeFocus = useRef(false);

  const model = store.shown;
  const match = useMemo(() => matcher(store.filter), [store.filter]);
  const cards = useMemo(() => cardsOf(model, match, store.order), [model, model.version, match, store.order]);
  const { columns, perLine, tops } = useMemo(() => layout(cards, view.width, store.density), [cards, view.width, store.density]);

  useLayoutEffect(() => {
    const element = box.current!;
    const measure = () => {
      const style = getComputedStyle(element);
      const width = element.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
      setView((v) => ({ ...v, top: element.scrollTop, width, height: element.clientHeight }));
    };
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    return () => observer.disconnect();
  }, []);

  const { gap } = sizes[store.density];
  const place = find(cards, current);
  const currentGPU = place ? cards[place.card]!.gpus[place.at]! : (cards[0]?.gpus[0] ?? null);
  const currentCard = place?.card ?? 0;

  // The focus follows the keyboard once the row is drawn.
  useLayoutEffect(() => {
    if (!takeFocus.current) return;
    takeFocus.current = false;
    cellAt(box.current!, place)?.focus({ preventScroll: true });
  });

  const [first, end] = rowsBetween(tops, view.top - beyond, view.top + view.height + beyond);
  const rows: number[] = [];
  for (let row = first; row < end; row++) rows.push(row);
  const currentRow = Math.floor(currentCard / columns);
  if (cards.length > 0 && !rows.includes(currentRow)) rows.push(currentRow);

  const shownPlace = pointed ?? (focused ? place : null);
  const shownGPU = shownPlace && cards[shownPlace.card]?.gpus[shownPlace.at];
  const hot = shownGPU?.holders?.[0] ? shownGPU.holders[0].namespace + '/' + shownGPU.holders[0].claim : null;

  const move = (to: Place) => {
    const gpu = cards[to.card]?.gpus[to.at];
    if (!gpu) return;
    setPointed(null);
    setCurrent({ node: gpu.node, key: keyOf(gpu) });
    takeFocus.current = true;
    const row = Math.floor(to.card / columns);
    const element = box.current!;
    if (tops[row]! < element.scrollTop) element.scrollTop = tops[row]!;
    else if (tops[row + 1]! > element.scrollTop + element.clientHeight - 2 * gap)
      element.scrollTop = tops[row + 1]! - element.clientHeight + 2 * gap;
  };

  const onKeyDown = (event: KeyboardEvent) => {
    const from = place ?? { card: 0, at: 0 };
    if (event.altKey || event.ctrlKey || event.metaKey || cards.length === 0) return;
    if (event.key === 'Enter' || event.key === ' ') {
      event.preventDefault();
      if (currentGPU) store.pin(currentGPU);
      return;
    }
    const to = next(event.key, from, cards.map((card) => card.gpus.length), columns, perLine, Math.max(1, rows.length - 3));
    if (!to) return;
    event.preventDefault();
    move(to);
  };

  return (
    <>
      <div
        ref={box}
        class={'grid ' + store.density}
        role="grid"
        aria-label="GPUs by node"
        aria-rowcount={cards.length}
        aria-readonly="true"
        onScroll={(event) => {
          const top = event.currentTarget.scrollTop;
          setPointed(null);
          setView((v) => ({ ...v, top }));
        }}
        onKeyDown={onKeyDown}
        onMouseOver={(event) => setPointed(placeOf(event.target))}
        onMouseLeave={() => setPointed(null)}
        onFocusIn={(event) => {
          setFocused(true);
          const at = placeOf(event.target);
          const gpu = at && cards[at.card]?.gpus[at.at];
          if (gpu) setCurrent({ node: gpu.node, key: keyOf(gpu) });
        }}
        onFocusOut={() => setFocused(false)}
        onClick={(event) => {
          const at = placeOf(event.target);
          const gpu = at && cards[at.card]?.gpus[at.at];
          if (gpu) store.pin(gpu);
        }}
      >
        {cards.length === 0 && <Empty store={store} />}
        <div class="space" role="presentation" style={{ height: tops.at(-1) + 'px' }}>
          {rows.map((row) => (
            <div
              key={row}
              class="row"
              role="presentation"
              style={{
                top: tops[row] + 'px',
                height: tops[row + 1]! - tops[row]! - gap + 'px',
                gridTemplateColumns: `repeat(${columns}, minmax(0, 1fr))`,
              }}
            >
              {cards.slice(row * columns, (row + 1) * columns).map((card, i) => (
                <CardView
                  key={card.key}
                  card={card}
                  perLine={perLine}
                  position={row * columns + i}
                  current={row * columns + i === currentCard ? currentGPU : null}
                  hot={hot}
                  fresh={model.fresh}
                />
              ))}
            </div>
          ))}
        </div>
      </div>
      {shownGPU && <Hover gpu={shownGPU} anchor={() => cellAt(box.current!, shownPlace)} />}
    </>
  );
}

function Empty({ store }: { store: Store }) {
  if (!isEverything(store.filter) && store.shown.gpus > 0) {
    return (
      <p class="empty">
        No GPU is like that.{' '}
        <button type="button" onClick={() => store.setFilter({ text: '', states: new Set(), model: '' })}>
          Show all {count(store.shown.gpus, 'GPU')}
        </button>
      </p>
    );
  }
  if (store.shown.version === 0) return <p class="empty">{store.connection === 'refused' ? store.refusal : 'Reading the cluster…'}</p>;
  return <p class="empty">No GPUs: no ResourceSlice has a device.</p>;
}

/** What is known of a GPU, beside it. */
function Hover({ gpu, anchor }: { gpu: GPU; anchor: () => HTMLElement | null }) {
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const cell = anchor()?.getBoundingClientRect();
    const element = box.current!;
    if (!cell) return;
    const { width, height } = element.getBoundingClientRect();
    const below = cell.bottom + 8 + height <= innerHeight;
    element.style.left = Math.max(8, Math.min(cell.left, innerWidth - width - 8)) + 'px';
    element.style.top = (below ? cell.bottom + 8 : Math.max(8, cell.top - height - 8)) + 'px';
    element.style.visibility = 'visible';
  });
  return (
    <div ref={box} class="hover" role="tooltip">
      <GPUDetails gpu={gpu} brief />
    </div>
  );
}

function placeOf(target: EventTarget | null): Place | null {
  const cell = (target as Element | null)?.closest<HTMLElement>('.gpu');
  const card = cell?.closest<HTMLElement>('.card');
  return cell && card ? { card: Number(card.dataset['card']), at: Number(cell.dataset['at']) } : null;
}

function cellAt(box: HTMLElement, place: Place | null): HTMLElement | null {
  return place && box.querySelector<HTMLElement>(`[data-card="${place.card}"] [data-at="${place.at}"]`);
}

function find(cards: { node: string; gpus: GPU[] }[], wanted: { node: string; key: string } | null): Place | null {
  if (!wanted) return null;
  for (let card = 0; card < cards.length; card++) {
    if (cards[card]!.node !== wanted.node) continue;
    const at = cards[card]!.gpus.findIndex((gpu) => keyOf(gpu) === wanted.key);
    if (at >= 0) return { card, at };
  }
  return null;
}

/** Where a key leads: left and right by GPU, up and down as it looks. */
function next(key: string, from: Place, lengths: number[], columns: number, perLine: number, rowsOfPage: number): Place | null {
  const { card, at } = from;
  const last = lengths.length - 1;
  const here = lengths[card]!;
  const column = at % perLine;
  const upTo = (to: number): Place => {
    const n = lengths[to]!;
    return { card: to, at: Math.min(Math.floor((n - 1) / perLine) * perLine + column, n - 1) };
  };
  const downTo = (to: number): Place => ({ card: to, at: Math.min(column, lengths[to]! - 1) });
  switch (key) {
    case 'ArrowRight':
      return at + 1 < here ? { card, at: at + 1 } : card < last ? { card: card + 1, at: 0 } : null;
    case 'ArrowLeft':
      return at > 0 ? { card, at: at - 1 } : card > 0 ? { card: card - 1, at: lengths[card - 1]! - 1 } : null;
    case 'ArrowDown':
      return at + perLine < here ? { card, at: at + perLine } : card + columns <= last ? downTo(card + columns) : null;
    case 'ArrowUp':
      return at >= perLine ? { card, at: at - perLine } : card >= columns ? upTo(card - columns) : null;
    case 'PageDown':
      return downTo(Math.min(last, card + columns * rowsOfPage));
    case 'PageUp':
      return downTo(Math.max(0, card - columns * rowsOfPage));
    case 'Home':
      return { card: 0, at: 0 };
    case 'End':
      return { card: last, at: lengths[last]! - 1 };
  }
  return null;
}
