// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

import type { Model } from './model';
import type { Density } from './store';
import type { GPU } from './types';

/** How many GPUs a card has at most: a pool of the network may have thousands, and cards are drawn as a whole. */
const most = 64;

/** A node, or a part of one that has very many GPUs. */
export interface Card {
  key: string;
  node: string;
  gpus: GPU[];
  /** The place of its first GPU in the node. */
  from: number;
  total: number;
  /** Those that are looked for; null is all. */
  found: ReadonlySet<GPU> | null;
}

/** The cards of all nodes that have a GPU which is looked for. */
export function cardsOf(model: Model, match: ((gpu: GPU) => boolean) | null, order: 'name' | 'free'): Card[] {
  let names = model.names();
  if (order === 'free') {
    const free = new Map(names.map((name) => [name, (model.nodes.get(name) ?? []).filter((gpu) => gpu.state === 'free').length]));
    names = [...names].sort((a, b) => (free.get(b) ?? 0) - (free.get(a) ?? 0));
  }
  const cards: Card[] = [];
  for (const node of names) {
    const all = model.nodes.get(node) ?? [];
    for (let from = 0; from < all.length; from += most) {
      const gpus = all.length <= most ? all : all.slice(from, from + most);
      const found = match && new Set(gpus.filter(match));
      if (found?.size === 0) continue;
      cards.push({ key: from ? node + ' ' + from : node, node, gpus, from, total: all.length, found });
    }
  }
  return cards;
}

/** Where the rows of cards are, from the widths and heights of style.css. */
export interface Layout {
  columns: number;
  /** GPUs side by side in a card. */
  perLine: number;
  /** The top of each row, and the end of the last one. */
  tops: number[];
}

export const sizes = {
  cards: { gap: 10, pad: 9, head: 37, cell: 34, cellGap: 4, lane: 9, minCell: 33, minCard: 200 },
  compact: { gap: 6, pad: 5, head: 18, cell: 15, cellGap: 2, lane: 7, minCell: 17, minCard: 110 },
};

export function layout(cards: Card[], width: number, density: Density): Layout {
  const { gap, pad, cellGap, minCell, minCard } = sizes[density];
  let largest = 1;
  for (const card of cards) largest = Math.max(largest, card.gpus.length);
  const perLine = largest <= 4 ? 4 : 8;
  const narrowest = perLine * minCell + (perLine - 1) * cellGap + 2 * pad + 2;
  const columns = Math.max(1, Math.floor((width + gap) / (Math.max(narrowest, minCard) + gap)));
  const tops = [0];
  for (let i = 0; i < cards.length; i += columns) {
    let height = 0;
    for (let j = i; j < Math.min(i + columns, cards.length); j++) height = Math.max(height, heightOf(cards[j]!, perLine, density));
    tops.push(tops[tops.length - 1]! + height + gap);
  }
  return { columns, perLine, tops };
}

function heightOf(card: Card, perLine: number, density: Density): number {
  const { pad, head, cell, cellGap, lane } = sizes[density];
  const lines = Math.ceil(card.gpus.length / perLine);
  const linked = groupsOf(card.gpus).length > 0 ? lane : 0;
  return 2 + 2 * pad + head + lines * (cell + linked) + (lines - 1) * cellGap;
}

/** The rows of a layout that are at least partly between two heights. */
export function rowsBetween(tops: number[], from: number, to: number): [first: number, end: number] {
  let low = 0;
  let high = tops.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (tops[middle + 1]! <= from) low = middle + 1;
    else high = middle;
  }
  let end = low;
  while (end < tops.length - 1 && tops[end]! < to) end++;
  return [low, end];
}

/** GPUs of a card that NVLink joins, by their places in the card. */
export interface Group {
  domain: string;
  members: number[];
  /** Groups that overlap are drawn on different levels. */
  level: number;
}

const groups = new WeakMap<GPU[], Group[]>();

/** The NVLink groups of two GPUs or more. */
export function groupsOf(gpus: GPU[]): Group[] {
  let found = groups.get(gpus);
  if (!found) {
    const domains = new Map<string, number[]>();
    gpus.forEach((gpu, i) => {
      const domain = gpu.place.nvlinkDomain;
      if (!domain) return;
      const key = gpu.driver + '/' + domain;
      const members = domains.get(key);
      if (members) members.push(i);
      else domains.set(key, [i]);
    });
    found = [];
    for (const [key, members] of domains) {
      if (members.length < 2) continue;
      const overlaps = found.filter((other) => other.members[0]! <= members.at(-1)! && members[0]! <= other.members.at(-1)!);
      let level = 0;
      while (overlaps.some((other) => other.level === level)) level++;
      found.push({ domain: key.slice(key.indexOf('/') + 1), members, level: level % 3 });
    }
    groups.set(gpus, found);
  }
  return found;
}
