// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

import * as api from './api';
import { everything, type Filter } from './filter';
import { Model } from './model';
import type { GPU, Moment, Status, Title } from './types';

export type Density = 'cards' | 'compact';

export type Connection = 'connecting' | 'open' | 'lost' | 'refused';

/** What the page knows, and what the user has chosen. Components are drawn anew after changes, at most once a frame. */
export class Store {
  title: Title | null = null;
  status: Status = { ready: false };
  connection: Connection = 'connecting';
  refusal = '';
  live = new Model();
  /** The model of an earlier time, if that is shown. */
  past: Model | null = null;
  /** The time that the user has chosen, in milliseconds since 1970. */
  wanted: number | null = null;
  moments: Moment[] = [];
  /** How far the server's clock is ahead. */
  ahead = 0;
  filter: Filter = everything;
  order: 'name' | 'free' = 'name';
  density: Density = localStorage.getItem('density') === 'compact' ? 'compact' : 'cards';
  /** The GPU whose details are pinned. */
  pinned: { node: string; key: string } | null = null;

  private listeners = new Set<() => void>();
  private frame = 0;
  private seeking = false;

  get shown(): Model {
    return this.past ?? this.live;
  }

  /** The time in the cluster: of a snapshot, when it was taken. */
  now(): number {
    return this.title?.file ? this.live.time : Date.now() + this.ahead;
  }

  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  changed(): void {
    // A page in the background has no frames, and need not be drawn.
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.listeners.forEach((listener) => listener());
    });
  }

  async start(): Promise<void> {
    try {
      await api.signIn();
    } catch (error) {
      this.connection = 'refused';
      this.refusal = (error as Error).message;
      this.changed();
      return;
    }
    await api.follow(
      {
        title: (title) => this.set(() => (this.title = title)),
        status: (status) => this.set(() => (this.status = status)),
        open: (ahead) =>
          this.set(() => {
            this.ahead = Math.abs(ahead) < 2000 ? 0 : ahead; // the header has whole seconds
            this.connection = 'open';
          }),
        lost: () => this.set(() => (this.connection = 'lost')),
        refused: (error) =>
          this.set(() => {
            this.connection = 'refused';
            this.refusal = error.message;
          }),
        change: (change) =>
          this.set(() => {
            this.live.apply(change);
            if (change.full) this.moments = [];
            if (change.moments) this.moments.push(...change.moments);
            const first = this.moments.findIndex(([version]) => version >= change.oldest);
            if (first > 0) this.moments.splice(0, first);
          }),
      },
      () => this.live.version,
    );
  }

  /** Shows the cluster as it was, or as it is. */
  seek(time: number | null): void {
    this.wanted = time;
    if (time === null) {
      this.past = null;
    } else {
      this.past ??= this.live.clone();
      void this.fetchPast();
    }
    this.changed();
  }

  private async fetchPast(): Promise<void> {
    if (this.seeking) return;
    this.seeking = true;
    try {
      while (this.past && this.wanted !== null) {
        const time = this.wanted;
        const past = this.past;
        const change = await api.at(time, past.version);
        if (this.past === past) {
          past.apply({ ...change, more: false });
          this.changed();
        }
        if (this.wanted === time) break;
      }
    } catch {
      this.seek(null); // the stream tells what is wrong
    } finally {
      this.seeking = false;
    }
  }

  setFilter(filter: Partial<Filter>): void {
    this.set(() => (this.filter = { ...this.filter, ...filter }));
  }

  setDensity(density: Density): void {
    localStorage.setItem('density', density);
    this.set(() => (this.density = density));
  }

  pin(gpu: GPU | null): void {
    this.set(() => (this.pinned = gpu && { node: gpu.node, key: keyOf(gpu) }));
  }

  pinnedGPU(): GPU | undefined {
    return this.pinned ? this.shown.nodes.get(this.pinned.node)?.find((gpu) => keyOf(gpu) === this.pinned?.key) : undefined;
  }

  set(change: () => void): void {
    change();
    this.changed();
  }
}

export function keyOf(gpu: GPU): string {
  return gpu.driver + '/' + gpu.pool + '/' + gpu.device;
}
