// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestSlicesThatAreNotPublishedAsWantedAreCounted: the controller calls every error recoverable, but some stay
// until the cluster or the agent changes.
func TestSlicesThatAreNotPublishedAsWantedAreCounted(t *testing.T) {
	registerMetrics()
	_, ctx := ktesting.NewTestContext(t)
	p := newPublisher(Options{NodeName: "node-1"}, newStatus())
	for reason, err := range map[string]error{
		"dropped_fields": &resourceslice.DroppedFieldsError{PoolName: "node-1", DesiredSlice: &resourceapi.ResourceSlice{}, ActualSlice: &resourceapi.ResourceSlice{}},
		"invalid":        apierrors.NewInvalid(schema.GroupKind{Group: resourceapi.GroupName, Kind: "ResourceSlice"}, "slice", nil),
		"other":          errors.New("the API server is away"),
		"forbidden":      fmt.Errorf("update: %w", apierrors.NewForbidden(schema.GroupResource{Resource: "resourceslices"}, "slice", errors.New("no right"))),
	} {
		before, metricErr := testutil.GetCounterMetricValue(sliceErrors.WithLabelValues(reason))
		if metricErr != nil {
			t.Fatal(metricErr)
		}
		p.handleError(ctx, err, "processing ResourceSlice objects")
		after, metricErr := testutil.GetCounterMetricValue(sliceErrors.WithLabelValues(reason))
		if metricErr != nil {
			t.Fatal(metricErr)
		}
		if after != before+1 {
			t.Errorf("%s counted %v times", reason, after-before)
		}
	}
}

// updates are what the controller is told: when, since the start, and how many slices.
type updates struct {
	start time.Time
	told  []string
}

func (u *updates) Update(resources *resourceslice.DriverResources) {
	u.told = append(u.told, fmt.Sprintf("%s: %d", time.Since(u.start), len(resources.Pools["node-1"].Slices)))
}

// TestASliceThatWasNotWrittenIsTriedAgainSoon: the controller itself waits longer each time, up to a quarter of an hour, and meanwhile a taint
// is missing. What the API server will refuse again is not tried again.
func TestASliceThatWasNotWrittenIsTriedAgainSoon(t *testing.T) {
	away := errors.New("the API server is away")
	invalid := apierrors.NewInvalid(schema.GroupKind{Group: resourceapi.GroupName, Kind: "ResourceSlice"}, "slice", nil)
	slices := func(n int) func(string) (resourceslice.DriverResources, bool) {
		return func(pool string) (resourceslice.DriverResources, bool) {
			return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{pool: {Slices: make([]resourceslice.Slice, n)}}}, true
		}
	}
	grows := func(_ context.Context, p *publisher) {
		p.resources = slices(4)
		p.refresh()
	}
	type step struct {
		at time.Duration
		do func(ctx context.Context, p *publisher)
	}
	fails := func(err error) func(context.Context, *publisher) {
		return func(ctx context.Context, p *publisher) { p.handleError(ctx, err, "processing ResourceSlice objects") }
	}
	tests := map[string]struct {
		steps []step
		want  []string
	}{
		"all is well": {},
		"one failure": {steps: []step{{time.Second, fails(away)}}, want: []string{"5s: 3"}},
		"it fails again with each try": {
			steps: []step{{time.Second, fails(away)}, {6 * time.Second, fails(away)}, {11 * time.Second, fails(away)}},
			want:  []string{"5s: 3", "10s: 3", "15s: 3"},
		},
		"several at once are tried once": {steps: []step{{time.Second, fails(away)}, {time.Second, fails(away)}}, want: []string{"5s: 3"}},
		"an invalid one is not":          {steps: []step{{time.Second, fails(invalid)}}},
		"a change is told at once":       {steps: []step{{time.Second, grows}}, want: []string{"1s: 4"}},
		"a registration makes it look":   {steps: []step{{time.Second, func(_ context.Context, p *publisher) { p.writeAnew() }}}, want: []string{"1s: 3"}},
		"what is wanted already is not told": {steps: []step{
			{time.Second, func(_ context.Context, p *publisher) { p.refresh() }}, {time.Minute, grows}, {2 * time.Minute, func(_ context.Context, p *publisher) { p.refresh() }},
		}, want: []string{"1m0s: 4"}},
		"an invalid one is, with the next look": {
			steps: []step{{time.Second, fails(invalid)}, {time.Minute, func(_ context.Context, p *publisher) { p.refresh() }}, {2 * time.Minute, func(_ context.Context, p *publisher) { p.refresh() }}},
			want:  []string{"1m0s: 3"},
		},
		"all is looked at once an hour": {steps: []step{{90 * time.Minute, func(context.Context, *publisher) {}}}, want: []string{"1h0m0s: 3", "2h0m0s: 3"}},
		"the newest is what is tried again": {
			steps: []step{{time.Second, grows}, {2 * time.Second, fails(away)}},
			want:  []string{"1s: 4", "5s: 4"},
		},
	}
	registerMetrics()
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, ctx := ktesting.NewTestContext(t)
				ctx, cancel := context.WithCancel(ctx)
				p := newPublisher(Options{NodeName: "node-1"}, newStatus())
				p.resources = slices(3)
				u := &updates{start: time.Now()}
				done, first := make(chan struct{}), p.wanted()
				go func() { defer close(done); p.update(ctx, u, first) }()
				for _, step := range tc.steps {
					time.Sleep(step.at - time.Since(u.start))
					synctest.Wait()
					step.do(ctx, p)
				}
				time.Sleep(50 * time.Minute)
				synctest.Wait()
				if diff := cmp.Diff(tc.want, u.told); diff != "" {
					t.Errorf("updates (-want +got):\n%s", diff)
				}
				cancel()
				<-done
			})
		})
	}
}

// TestPublishingIsTriedAgain, with pauses that grow up to half a minute, and ends with the agent.
func TestPublishingIsTriedAgain(t *testing.T) {
	registerMetrics()
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		ctx, cancel := context.WithCancel(ctx)
		p := newPublisher(Options{NodeName: "node-1"}, newStatus())
		var tries []time.Time
		done := make(chan struct{})
		go func() {
			defer close(done)
			p.keepOn(ctx, func(context.Context) error {
				tries = append(tries, time.Now())
				return errors.New("no space left on device")
			})
		}()
		time.Sleep(10 * time.Minute)
		cancel()
		<-done
		if len(tries) < 20 {
			t.Errorf("tried %d times in ten minutes", len(tries))
		}
		for i := 1; i < len(tries); i++ {
			pause := tries[i].Sub(tries[i-1])
			want := min(time.Second<<min(i-1, 5), 30*time.Second)
			if pause < want || pause > want+want/5 {
				t.Errorf("pause %d is %s, want about %s", i, pause, want)
			}
		}
		p.keepOn(ctx, func(context.Context) error { return nil }) // nothing more to do
	})
}

// TestWhatCouldNotBePublishedIsStillWanted, and without another change.
func TestWhatCouldNotBePublishedIsStillWanted(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	p := newPublisher(Options{NodeName: "node-1", StateDir: filepath.Join(t.TempDir(), "missing")}, newStatus())
	p.resources = func(string) (resourceslice.DriverResources, bool) { return emptyPool("gpus"), true }
	p.refresh()
	for range 2 {
		if err := p.publish(ctx); err == nil {
			t.Fatal("published without a lock")
		}
	}
}

// writes are the slices as they were written, one after the other.
func writes(api *apiServer) (slices []*resourceapi.ResourceSlice) {
	for _, action := range api.Actions() {
		if action.GetResource().Resource != "resourceslices" {
			continue
		}
		switch a := action.(type) {
		case clienttesting.CreateAction: // updates have the same methods
			if slice, ok := a.GetObject().(*resourceapi.ResourceSlice); ok { // of an older version from who asked while the API server was away
				slices = append(slices, slice)
			}
		}
	}
	return slices
}

// namingServer is an API server that names slices.
func namingServer(objects ...runtime.Object) *apiServer {
	api := newAPIServer(append(objects, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "node-uid"}})...)
	n := 0
	api.PrependReactor("create", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		slice, ok := action.(clienttesting.CreateAction).GetObject().(*resourceapi.ResourceSlice)
		if !ok { // who asked while it was away tries older versions, too
			return true, nil, errAway
		}
		n++
		slice.Name, slice.UID = fmt.Sprint(slice.GenerateName, n), types.UID(fmt.Sprint("slice-", n))
		return false, nil, nil
	})
	return api
}

// writtenTaints returns the taints that a GPU is written with from now on, as "key=value, added at 1m0s" since start, a line for each write.
// Where the agent does not say when a taint was added the API server does.
func writtenTaints(api *apiServer, gpu string, start time.Time) func() []string {
	var mu sync.Mutex
	var written []string
	api.PrependReactor("*", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		write, ok := action.(clienttesting.CreateAction) // updates have the same methods
		if !ok {
			return false, nil, nil
		}
		mu.Lock()
		defer mu.Unlock()
		for _, device := range write.GetObject().(*resourceapi.ResourceSlice).Spec.Devices {
			var taints []string
			for i := range device.Taints {
				taint := &device.Taints[i]
				if taint.TimeAdded == nil {
					taint.TimeAdded = &metav1.Time{Time: time.Now().Truncate(time.Second)}
				}
				taints = append(taints, fmt.Sprintf("%s=%s, added at %s", taint.Key, taint.Value, taint.TimeAdded.Sub(start)))
			}
			if device.Name == gpu {
				written = append(written, strings.Join(taints, "; "))
			}
		}
		return false, nil, nil
	})
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(written)
	}
}

// TestWhatIsOccupiedIsKnownBeforeAnythingIsPublished: an agent that starts must not take the taints away that the one before has set.
func TestWhatIsOccupiedIsKnownBeforeAnythingIsPublished(t *testing.T) {
	registerMetrics()
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		const gpu = "gpu-0000-00-1b-0"
		r, api := newRig(t, "t4"), namingServer()
		before := r.agent(ctx, api)
		if _, err := before.claims.Prepare(ctx, allocatedClaim("left", gpu)); err != nil { // the API server does not know it any more
			t.Fatal(err)
		}
		background(ctx, before.watch)() // it ends
		r.kubeletTakes = 10 * time.Second
		agent := r.blindAgent(ctx, api)
		defer background(ctx, agent.watch)()
		defer background(ctx, agent.publisher.run)()
		time.Sleep(time.Minute)
		n := 0
		for _, slice := range writes(api) {
			for _, device := range slice.Spec.Devices {
				if device.Name != gpu {
					continue
				}
				n++
				if len(device.Taints) != 1 || device.Taints[0].Key != TaintKey(reasonOccupied) {
					t.Errorf("written of %s: taints %v", gpu, device.Taints)
				}
			}
		}
		if n == 0 {
			t.Error("the GPU was not published")
		}
	})
}

// TestAForeignUseIsKnownBeforeAnythingIsPublished: a start and a restart leave its taint where it is, and as old as it is, also if somebody
// deletes the slices afterwards.
func TestAForeignUseIsKnownBeforeAnythingIsPublished(t *testing.T) {
	registerMetrics()
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		const gpu = "gpu-0000-00-1b-0"
		start := time.Now()
		r, api := newRig(t, "t4"), namingServer()
		written := writtenTaints(api, gpu, start)
		r.do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 41, Kind: nvmlsim.ProcessCompute, Command: "python3"}})
		time.Sleep(time.Minute)
		run := func(what string) (stop func()) {
			agent := r.blindAgent(ctx, api)
			agent.opts.HostProcesses = TaintForHostProcesses
			stopWatch, stopPublisher := background(ctx, agent.watch), background(ctx, agent.publisher.run)
			time.Sleep(time.Minute)
			if len(agent.opts.Hardware.withheld.foreignUses()) != 1 {
				t.Errorf("%s: it is not known that the GPU is used", what)
			}
			return func() { stopPublisher(); stopWatch() }
		}
		run("at the first start")()
		defer run("after a restart")()
		deleteSlices(ctx, t, api)
		time.Sleep(time.Minute)
		all := written()
		if len(all) < 2 {
			t.Errorf("the GPU was published %d times, want it published again after its slice was deleted", len(all))
		}
		for i, got := range all {
			// The library writes at once, or a second later if it was just about to write.
			if want := "gpu.nvidia.com/in-use=host-process, added at 1m"; got != all[0] || got != want+"0s" && got != want+"1s" {
				t.Errorf("write %d: taints %q, want %q, with the second of the first write", i, got, want)
			}
		}
	})
}

// TestARestartKeepsTheTaintOfANodeThatCannotPrepare, and its age.
func TestARestartKeepsTheTaintOfANodeThatCannotPrepare(t *testing.T) {
	registerMetrics()
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r, api := newRig(t, "t4"), namingServer()
		written := writtenTaints(api, "gpu-0000-00-1b-0", time.Now())
		run := func() (stop func()) {
			agent := r.agent(ctx, api)
			agent.status.set(stageLedger, true)
			agent.status.fail(stageFolders, reasonFolderFull, "full")
			agent.status.set(stageServing, true)
			agent.check.begin(ctx)
			stopWatch, stopPublisher := background(ctx, agent.watch), background(ctx, agent.publisher.run)
			time.Sleep(time.Minute)
			return func() { stopPublisher(); stopWatch() }
		}
		run()()
		defer run()()
		deleteSlices(ctx, t, api)
		time.Sleep(time.Minute)
		all := written()
		if len(all) < 2 {
			t.Errorf("the GPU was published %d times, want it published again after its slice was deleted", len(all))
		}
		for i, got := range all {
			if want := "gpu.nvidia.com/not-ready=FolderFull, added at 1s"; got != want {
				t.Errorf("write %d: taints %q, want %q", i, got, want)
			}
		}
	})
}

// deleteSlices does what a kubelet that starts does.
func deleteSlices(ctx context.Context, t *testing.T, api *apiServer) {
	t.Helper()
	list, err := api.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, slice := range list.Items {
		if err := api.ResourceV1().ResourceSlices().Delete(ctx, slice.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}
