// Command allocator measures this project's allocator against upstream's, in one process and one run, and prints a
// table (make bench-allocator). It fails when a target is missed, or when the ratio of the two has fallen by more than
// a fifth below what is recorded in floors.json.
//
// Times of one machine say little about another, and those of a busy machine say little at all: therefore ratios, from
// medians of runs that take turns. What is measured is what one pod costs: for upstream a new allocator and one
// allocation per node, as kube-scheduler does it; for ours the compiled claims and one Check per node, on an inventory
// and a usage index that events keep up to date.
//
// -record writes floors.json anew. Round what it writes down by what two runs differ in, before it is committed.
package main
