// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"runtime"
	"testing"
	"time"

	"github.com/go-logr/logr"
)

// An hour of histories must fit into memory: each leaves nothing behind, though it ends with timers that have not fired.
func TestAHistoryLeavesNothingInMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("plays 40 histories, the heap of each of which is collected: run without -short")
	}
	scenario := Scenario{
		Nodes: []Node{{Name: "a", GPUs: 2, Attached: 1}},
		Steps: []Step{
			Pod{Name: "p", Ask: Ask{GPUs: 2}, Grace: 86400 * time.Second},
			Pod{Name: "q", Ask: Ask{GPUs: 1}},
			Wait{time.Second},
			Delete{Pod: "p"},
			Restart{},
			Wait{time.Second},
		},
	}
	for name, groups := range map[string]bool{"pods": false, "groups": true} {
		t.Run(name, func(t *testing.T) {
			scenario.Groups = groups
			play := func() {
				if differences := Run(t, scenario, logr.Discard()); len(differences) > 0 {
					t.Fatal(differences)
				}
			}
			play()
			before := heapKiB()
			const plays = 20
			for range plays {
				play()
			}
			if kept := (heapKiB() - before) / plays; kept > 100 {
				t.Errorf("a history keeps %d KiB", kept)
			}
		})
	}
}

func heapKiB() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc >> 10)
}
