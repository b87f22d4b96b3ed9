// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"context"
	"fmt"
	"testing"

	"k8s.io/dynamic-resource-allocation/structured"
)

// benchWorld has nodes with 8 GPUs each, one slice per node, of which the first so many are held.
func benchWorld(nodes, held int) *world {
	w := rig()
	for i := range nodes {
		name := fmt.Sprintf("node-%04d", i)
		w.node(name, gpus(8)...)
		for j := range held {
			w.hold(fmt.Sprintf("%s/gpu-%d", name, j))
		}
	}
	return w
}

// The two benchmarks filter one pod over all nodes; compare their ns/op.
func BenchmarkFilter1GPUOver5000Nodes(b *testing.B) {
	benchmarkFilter(b, benchWorld(5000, 4).claim("c", exactly("gpu", 1)))
}

func BenchmarkFilter1GPUOver5000NodesUpstream(b *testing.B) {
	benchmarkUpstream(b, benchWorld(5000, 4).claim("c", exactly("gpu", 1)))
}

func BenchmarkFilter1GPUOver5000FullNodes(b *testing.B) {
	benchmarkFilter(b, benchWorld(5000, 8).claim("c", exactly("gpu", 1)))
}

func BenchmarkFilter1GPUOver5000FullNodesUpstream(b *testing.B) {
	benchmarkUpstream(b, benchWorld(5000, 8).claim("c", exactly("gpu", 1)))
}

func BenchmarkFilterMatchAttributeOver500Nodes(b *testing.B) {
	benchmarkFilter(b, benchWorld(500, 3).claim("c", exactly("gpu", 2)).matchAttribute("a.example.com/root"))
}

func BenchmarkFilterMatchAttributeOver500NodesUpstream(b *testing.B) {
	benchmarkUpstream(b, benchWorld(500, 3).claim("c", exactly("gpu", 2)).matchAttribute("a.example.com/root"))
}

func benchmarkFilter(b *testing.B, w *world) {
	view, held := w.store().View(), w.usage()
	filter := func() int {
		requests, err := Compile(w.claims, view, DefaultFeatures())
		if err != nil {
			b.Fatal(err)
		}
		fits := 0
		for _, node := range w.nodes {
			if Check(context.Background(), Input{Requests: requests, Node: node, Inventory: view, Usage: held}).Fits() {
				fits++
			}
		}
		return fits
	}
	fits := filter() // slices have been seen
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		if n := filter(); n != fits {
			b.Fatalf("%d nodes fit, then %d", fits, n)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(w.nodes)), "ns/node")
}

func benchmarkUpstream(b *testing.B, w *world) {
	b.ReportAllocs()
	for range b.N {
		var upstream structured.Allocator = newUpstream(b, w)
		for _, node := range w.nodes {
			if _, err := upstream.Allocate(context.Background(), node, w.claims); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(w.nodes)), "ns/node")
}
