// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Command allocator measures this project's allocator against upstream's, in one process and one run, and prints a
// table (make bench-allocator). It fails when the ratio of the two has fallen by more than a fifth below what is recorded
// in floors.json, which reaches the targets.
//
// Times of one machine say little about another, and those of a busy machine say little at all: therefore ratios, from
// medians of runs that take turns. What is measured is what one pod costs: for upstream a new allocator and one
// allocation per node, as kube-scheduler does it; for ours the compiled claims and one Check per node, on an inventory
// and a usage index that events keep up to date.
//
// What is recorded is the least of several runs of one commit, of which at least one is on a machine that is busy with other
// things, rounded down: so noise alone does not fail a run. -record writes what one run measures. Raise it when the
// allocator has become faster, or what is won may be lost unseen.
//
// Times on the clock (a claim event, impossible requests) have targets, too, and fail at five times these: another
// processor may be slower. That an event takes as long whatever the number of nodes is judged by a ratio.
package main
