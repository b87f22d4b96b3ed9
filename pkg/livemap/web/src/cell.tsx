// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

import { type Card, type Group, groupsOf } from './cards';
import { keyOf } from './store';
import { describe, memoryOf, quantity } from './text';
import type { GPU, Holder } from './types';
import { Component } from 'preact';

interface Segment {
  holder: Holder | null;
  weight: number;
}

/** What holders have of a GPU, in parts of 1; the rest is free. */
function segments(gpu: GPU): Segment[] {
  const parts: Segment[] = [];
  let rest = 1;
  for (const holder of gpu.holders ?? []) {
    if (holder.admin) continue;
    let weight = NaN;
    if (gpu.state === 'partitioned') {
      // A profile "3g.40gb" is three of the seven slices of a GPU, https://docs.nvidia.com/datacenter/tesla/mig-user-guide/.
      weight = Number(/^(\d+)g\./.exec(holder.profile ?? '')?.[1]) / 7;
    } else if (gpu.memoryBytes) {
      weight = quantity(memoryOf(holder, gpu.driver) ?? '') / gpu.memoryBytes;
    }
    if (!(weight > 0)) weight = 1 / 7;
    parts.push({ holder, weight });
    rest -= weight;
  }
  if (rest > 0.01) parts.push({ holder: null, weight: rest });
  return parts;
}

function Cell(props: { gpu: GPU; at: number; index: number; dim: boolean; hot: boolean; tab: boolean; fresh: boolean }) {
  const { gpu } = props;
  let classes = 'gpu ' + gpu.state;
  if (props.dim) classes += ' dim';
  if (props.hot) classes += ' hot';
  if (props.fresh) classes += ' fresh';
  if (gpu.state !== 'tainted' && (gpu.taints?.length ?? 0) > 0) classes += ' warned';
  const divided = gpu.state === 'partitioned' || gpu.state === 'shared';
  if (divided) classes += ' divided';
  // Of gpu-3 its 3. Names such as gpu-0000-1b-00-0 all end alike: those have the place in the node, as in topo.
  const short = /^\D*(\d{1,3})$/.exec(gpu.device)?.[1] ?? String(props.index);
  return (
    <div
      role="gridcell"
      class={classes}
      tabIndex={props.tab ? 0 : -1}
      aria-label={describe(gpu)}
      aria-colindex={props.index + 2}
      data-at={props.at}
    >
      {short}
      {divided && (
        <span class="parts" aria-hidden="true">
          {segments(gpu).map((part, i) => (
            <span key={i} class={part.holder ? 'part' : 'part rest'} style={{ flexGrow: part.weight }} />
          ))}
        </span>
      )}
    </div>
  );
}

/** The NVLink groups below a line of cells: a line from the first member to the last one, and a stem to each. */
function Lane(props: { groups: Group[]; from: number; perLine: number }) {
  return (
    <svg class="lane" viewBox={`0 0 ${props.perLine} 9`} preserveAspectRatio="none" aria-hidden="true">
      {props.groups.map((group) => {
        const members = group.members.map((i) => i - props.from).filter((i) => i >= 0 && i < props.perLine);
        if (members.length === 0) return null;
        const y = 3.5 + 2.5 * group.level;
        const stems = members.map((i) => `M${i + 0.5} 0V${y}`).join('');
        return <path key={group.domain} class={'link level' + group.level} d={`${stems}M${members[0]! + 0.5} ${y}H${members.at(-1)! + 0.5}`} />;
      })}
    </svg>
  );
}

export interface CardProps {
  card: Card;
  perLine: number;
  /** The place of the card among all. */
  position: number;
  /** The GPU that the keyboard is at, if it is in this card. */
  current: GPU | null;
  /** The claim whose GPUs stand out, as namespace/claim. */
  hot: string | null;
  fresh: WeakMap<GPU, number>;
}

/** A node with its GPUs: a row of the grid, for those who do not see it. */
export class CardView extends Component<CardProps> {
  override shouldComponentUpdate(next: CardProps): boolean {
    const now = this.props;
    return (
      now.card.gpus !== next.card.gpus ||
      now.card.node !== next.card.node ||
      now.position !== next.position ||
      now.perLine !== next.perLine ||
      now.current !== next.current ||
      (now.hot !== next.hot && (holds(now.card, now.hot) || holds(next.card, next.hot))) ||
      !sameSet(now.card.found, next.card.found)
    );
  }

  override render() {
    const { card, perLine, position, current, hot, fresh } = this.props;
    const free = card.gpus.filter((gpu) => gpu.state === 'free').length;
    const groups = groupsOf(card.gpus);
    const lines = [];
    const now = performance.now();
    for (let from = 0; from < card.gpus.length; from += perLine) {
      lines.push(
        <div key={from} class="line" role="presentation">
          {card.gpus.slice(from, from + perLine).map((gpu, i) => (
            <Cell
              key={keyOf(gpu)}
              gpu={gpu}
              at={from + i}
              index={card.from + from + i}
              dim={card.found !== null && !card.found.has(gpu)}
              hot={hot !== null && claims(gpu, hot)}
              tab={gpu === current}
              fresh={now - (fresh.get(gpu) ?? -Infinity) < 1500}
            />
          ))}
        </div>,
      );
      if (groups.length > 0) lines.push(<Lane key={'lane' + from} groups={groups} from={from} perLine={perLine} />);
    }
    const name = card.node === '*' ? 'network-attached' : card.node;
    const range = card.total > card.gpus.length ? ` (${card.from + 1}–${card.from + card.gpus.length} of ${card.total})` : '';
    return (
      <div class={'card per' + perLine} role="row" aria-rowindex={position + 1} data-card={position} data-node={card.node}>
        <div class="head" role="rowheader" aria-label={`${name}${range}, ${card.gpus.length} GPUs, ${free} free`}>
          <span class="name" title={name}>
            {name}
            {range}
          </span>
          <span class={free ? 'count some' : 'count'}>{free} free</span>
          <span class="what">{modelsOf(card.gpus)}</span>
        </div>
        <div class="lines" role="presentation">
          {lines}
        </div>
      </div>
    );
  }
}

/** "8 × NVIDIA H100 80GB HBM3" */
function modelsOf(gpus: GPU[]): string {
  const models = new Map<string, number>();
  for (const gpu of gpus) {
    const model = gpu.model ?? (gpu.state === 'gone' ? 'not published' : 'unknown model');
    models.set(model, (models.get(model) ?? 0) + 1);
  }
  return [...models].map(([model, n]) => `${n} × ${model}`).join(', ');
}

export function claims(gpu: GPU, claim: string): boolean {
  return gpu.holders?.some((holder) => holder.namespace + '/' + holder.claim === claim) ?? false;
}

function holds(card: Card, claim: string | null): boolean {
  return claim !== null && card.gpus.some((gpu) => claims(gpu, claim));
}

function sameSet(a: ReadonlySet<GPU> | null, b: ReadonlySet<GPU> | null): boolean {
  if (a === null || b === null) return a === b;
  return a.size === b.size && [...a].every((gpu) => b.has(gpu));
}
