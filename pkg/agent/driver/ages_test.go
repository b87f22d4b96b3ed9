// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// ages are the times at which taints of the first GPU that would be published were added, since start, by their keys.
func ages(h *Hardware, start time.Time) map[string]string {
	resources, _ := h.Resources("node-1")
	list := map[string]string{}
	for _, taint := range resources.Pools["node-1"].Slices[0].Devices[0].Taints {
		list[taint.Key] = "no time"
		if taint.TimeAdded != nil {
			list[taint.Key] = taint.TimeAdded.Sub(start).String()
		}
	}
	return list
}

// TestATaintIsAsOldAsItsFault, also when the agent was started anew: tolerationSeconds count from there.
func TestATaintIsAsOldAsItsFault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		start := time.Now()
		r := newRig(t, "t4")
		want := map[string]string{TaintKey(health.XID): "1m0s", TaintKey(health.Lost): "3m0s"}
		h := r.found(ctx)
		stop := background(ctx, h.Watch)
		time.Sleep(time.Minute)
		r.do(&nvmlsim.RaiseXID{GPU: "0", Code: 74})
		time.Sleep(2 * time.Minute)
		r.do(&nvmlsim.LoseGPU{GPU: "0"})
		time.Sleep(time.Minute)
		if diff := cmp.Diff(want, ages(h, start)); diff != "" {
			t.Errorf("ages (-want +got):\n%s", diff)
		}
		stop()
		h = r.found(ctx)
		if diff := cmp.Diff(want, ages(h, start)); diff != "" {
			t.Errorf("before another agent has asked the GPU: ages (-want +got):\n%s", diff)
		}
		stop = background(ctx, h.Watch)
		time.Sleep(time.Minute)
		if diff := cmp.Diff(want, ages(h, start)); diff != "" {
			t.Errorf("after another agent was started: ages (-want +got):\n%s", diff)
		}
		stop()
	})
}

// TestATaintOfSeveralFaultsIsAsOldAsTheOldest.
func TestATaintOfSeveralFaultsIsAsOldAsTheOldest(t *testing.T) {
	start := time.Date(2026, 11, 22, 0, 0, 0, 900, time.UTC)
	fault := func(compute uint32, age time.Duration) health.Fault {
		return health.Fault{Reason: health.XID, Value: fmt.Sprint(compute), Instance: &nvml.Instance{Compute: compute}, Since: start.Add(-age)}
	}
	for name, tc := range map[string]struct {
		faults []health.Fault
		want   time.Duration
	}{
		"the first":  {[]health.Fault{fault(0, time.Hour), fault(1, time.Minute)}, time.Hour},
		"the second": {[]health.Fault{fault(0, time.Minute), fault(1, time.Hour)}, time.Hour},
		"one":        {[]health.Fault{fault(0, time.Minute)}, time.Minute},
	} {
		list := taints(health.Verdict{Faults: tc.faults})
		if len(list) != 1 || list[0].Value != "0" || list[0].TimeAdded == nil || !list[0].TimeAdded.Equal(&metav1.Time{Time: start.Truncate(time.Second).Add(-tc.want)}) {
			t.Errorf("%s: %v", name, list)
		}
	}
}

// TestTheAgeOfATaintThatWasDeletedWithItsSliceIsKnown, as long as the device was not published without it.
func TestTheAgeOfATaintThatWasDeletedWithItsSliceIsKnown(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	registerMetrics()
	added, later := metav1.Unix(1000, 0), metav1.Unix(2000, 0)
	taint := func(value string, at *metav1.Time) resourceapi.DeviceTaint {
		return resourceapi.DeviceTaint{Key: TaintKey(reasonOccupied), Value: value, Effect: resourceapi.DeviceTaintEffectNoSchedule, TimeAdded: at}
	}
	slice := func(uid types.UID, taints ...resourceapi.DeviceTaint) *resourceapi.ResourceSlice {
		s := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{UID: uid}}
		s.Spec.Devices = []resourceapi.Device{{Name: "gpu-0", Taints: taints}}
		return s
	}
	for name, tc := range map[string]struct {
		seen []*resourceapi.ResourceSlice
		of   resourceapi.DeviceTaint
		want *metav1.Time
	}{
		"never published":                       {nil, taint("a", nil), nil},
		"published":                             {[]*resourceapi.ResourceSlice{slice("1", taint("a", &added))}, taint("a", nil), &added},
		"published for another claim":           {[]*resourceapi.ResourceSlice{slice("1", taint("b", &added))}, taint("a", nil), nil},
		"published anew, without it":            {[]*resourceapi.ResourceSlice{slice("1", taint("a", &added)), slice("2")}, taint("a", nil), nil},
		"published, and it knows by itself":     {[]*resourceapi.ResourceSlice{slice("1", taint("a", &added))}, taint("a", &later), &later},
		"published, and another taint since":    {[]*resourceapi.ResourceSlice{slice("1", taint("a", &added)), slice("1", taint("a", &added), taint("b", &later))}, taint("a", nil), &added},
		"published, for this one after another": {[]*resourceapi.ResourceSlice{slice("1", taint("b", &added), taint("a", &later))}, taint("a", nil), &later},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPublisher(Options{NodeName: "node-1"}, newStatus())
			for _, s := range tc.seen {
				p.server.saw(ctx, s)
			}
			p.resources = func(pool string) (resourceslice.DriverResources, bool) {
				devices := []resourceapi.Device{{Name: "gpu-1"}, {Name: "gpu-0", Taints: []resourceapi.DeviceTaint{tc.of}}}
				return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{pool: {Slices: []resourceslice.Slice{{Devices: devices}}}}}, true
			}
			if diff := cmp.Diff(tc.want, p.wanted().Pools["node-1"].Slices[0].Devices[1].Taints[0].TimeAdded); diff != "" {
				t.Errorf("added (-want +got):\n%s", diff)
			}
		})
	}
}

// TestWhatIsKnownIsWrittenByOneAtATime: an agent that begins to lead writes it, and so does each look at the node.
func TestWhatIsKnownIsWrittenByOneAtATime(t *testing.T) {
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	ctx := klog.NewContext(t.Context(), logger)
	m := &memory{dir: t.TempDir(), lead: true, known: &discovery.Node{}}
	for round := range 50 {
		var group sync.WaitGroup
		for i := range 4 {
			group.Go(func() {
				m.mu.Lock()
				m.known = &discovery.Node{DriverVersion: fmt.Sprint(round), GPUs: make([]discovery.GPU, len(m.known.GPUs)%64+1)}
				for n := range m.known.GPUs {
					m.known.GPUs[n].Name = fmt.Sprint(round, i, n)
				}
				m.mu.Unlock()
				m.save(ctx)
			})
		}
		group.Wait()
		if diff := cmp.Diff(m.known, m.load(ctx)); diff != "" {
			t.Fatalf("round %d: known to the next agent (-want +got):\n%s", round, diff)
		}
	}
	if said := logger.GetSink().(ktesting.Underlier).GetBuffer().String(); said != "" {
		t.Error(said)
	}
}

// TestAnAgentThatFollowsRemembersNothing in the folder in which another one does.
func TestAnAgentThatFollowsRemembersNothing(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	r := newRig(t, "t4")
	h := r.found(ctx)
	path := filepath.Join(r.state, "gpus.json")
	if _, err := os.Stat(path); err != nil {
		t.Fatal(err)
	}
	h.Follow()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Discover(context.WithoutCancel(ctx)); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("the file is there: %v", err)
	}
}
