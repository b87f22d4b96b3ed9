// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/nvmlsim"
)

const benchGPUs = 64

// BenchmarkPrepareWholeGPU prepares 64 claims for 64 GPUs of one node, with real fsync, one after the other and all at
// once. It reports the median and the 99th percentile of a single Prepare.
func BenchmarkPrepareWholeGPU(b *testing.B) {
	for _, atOnce := range []int{1, benchGPUs} {
		b.Run(fmt.Sprintf("%d-at-once", atOnce), func(b *testing.B) {
			n, claims := benchNode(b)
			m := n.manager()
			var took []time.Duration
			for b.Loop() {
				durations := make([]time.Duration, len(claims))
				for batch := range slices.Chunk(slices.Collect(indices(len(claims))), atOnce) {
					var group sync.WaitGroup
					for _, i := range batch {
						group.Go(func() {
							start := time.Now()
							if _, err := m.Prepare(n.ctx, claims[i]); err != nil {
								b.Error(err)
							}
							durations[i] = time.Since(start)
						})
					}
					group.Wait()
				}
				took = append(took, durations...)
				b.StopTimer()
				for _, c := range claims {
					if err := m.Unprepare(n.ctx, c.UID); err != nil {
						b.Fatal(err)
					}
				}
				b.StartTimer()
			}
			slices.Sort(took)
			b.ReportMetric(milliseconds(took[len(took)/2]), "p50-ms")
			b.ReportMetric(milliseconds(took[len(took)*99/100]), "p99-ms")
			b.ReportMetric(0, "ns/op")
		})
	}
}

func indices(n int) func(func(int) bool) {
	return func(yield func(int) bool) {
		for i := range n {
			if !yield(i) {
				return
			}
		}
	}
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// benchNode is a machine with 64 GPUs, and a claim for each.
func benchNode(b *testing.B) (*node, []*resourceapi.ResourceClaim) {
	b.Helper()
	profile, err := nvmlsim.LoadProfile("t4")
	if err != nil {
		b.Fatal(err)
	}
	profile.Name = "many-t4"
	var claims []*resourceapi.ResourceClaim
	model := profile.GPUs[0]
	profile.GPUs = nil
	for i := range benchGPUs {
		gpu := model
		gpu.PCI = fmt.Sprintf("pci%04x:00/%04x:00:01.0/%04x:01:00.0", i, i, i)
		profile.GPUs = append(profile.GPUs, gpu)
		claims = append(claims, claim(fmt.Sprintf("train-%d", i), result(fmt.Sprintf("gpu=gpu-%04x-01-00-0", i))))
	}
	root := b.TempDir()
	data, err := yaml.Marshal(profile)
	if err != nil {
		b.Fatal(err)
	}
	path := filepath.Join(root, "many-t4.yaml")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		b.Fatal(err)
	}
	ctx := context.Background() // without the test's log
	h, err := newHardware(ctx, root, path, "")
	if err != nil {
		b.Fatal(err)
	}
	return &node{t: b, ctx: ctx, root: root, fsys: durable.OS{}, hardware: h, tools: sharing.NewSimulated(h.machine), timeout: 10 * time.Second}, claims
}
