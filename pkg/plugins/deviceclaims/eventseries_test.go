// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/failures"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
)

// series is an API server that knows how often each event was seen.
type series struct {
	mutex sync.Mutex
	seen  map[string]int32 // by name
	texts map[string]string
}

func (s *series) Create(_ context.Context, event *eventsv1.Event) (*eventsv1.Event, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.seen[event.Name] = 1
	s.texts[event.Name] = event.Type + " " + event.Reason + " " + event.Regarding.Name + " " + event.Related.Name
	return event, nil
}

func (s *series) Update(context.Context, *eventsv1.Event) (*eventsv1.Event, error) {
	return nil, errors.New("events are patched")
}

func (s *series) Patch(_ context.Context, event *eventsv1.Event, _ []byte) (*eventsv1.Event, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.seen[event.Name] = event.Series.Count
	return event, nil
}

// counts are what kubectl shows: each event with how often it was seen.
func (s *series) counts() map[string][]int32 {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	counts := map[string][]int32{}
	for name, text := range s.texts {
		counts[text] = append(counts[text], s.seen[name])
	}
	return counts
}

// A pod is written at each failed attempt. What it is told again, of one claim and for one reason, is counted as one event nevertheless.
func TestEventsOfOneReasonAndClaimAreCountedAsOne(t *testing.T) {
	const attempts = 5
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		server := &series{seen: map[string]int32{}, texts: map[string]string{}}
		broadcaster := events.NewBroadcaster(server)
		defer broadcaster.Shutdown()
		if err := broadcaster.StartRecordingToSinkWithContext(ctx); err != nil {
			t.Fatal(err)
		}
		profile := profileWith{recorder: broadcaster.NewRecorder(scheme.Scheme, "scheduler")}
		handler := func(
			_ context.Context, profile framework.Framework, pod *framework.QueuedPodInfo, status *fwk.Status, _ *fwk.NominatingInfo, _ time.Time,
		) {
			profile.EventRecorder().WithLogger(klog.Background()).Eventf(pod.Pod, nil, v1.EventTypeWarning, "FailedScheduling", "Scheduling", status.Message())
		}
		version := 0
		for range attempts {
			for _, name := range []string{"p", "q"} {
				for _, claim := range []*resourceapi.ResourceClaim{claim("mine"), claim("ours")} {
					for _, reason := range []string{podevents.ReasonLostRace, podevents.ReasonClaimFull} {
						version++
						p := pod(name)
						p.ResourceVersion = fmt.Sprint(version)
						status := failures.StatusOfBinding(p, "node-a", podevents.Postpone(reason, claim, fmt.Errorf("attempt %d", version)))
						info := &framework.QueuedPodInfo{PodInfo: &framework.PodInfo{Pod: p}}
						(&Shared{common: &contention.Common{Nominations: nominationsWith(p)}}).HandleFailures(handler)(ctx, profile, info, status, nil, time.Time{})
						time.Sleep(time.Second) // events are named after the time
						synctest.Wait()
					}
				}
			}
		}
		time.Sleep(time.Hour) // until the broadcaster has written the last counts
		synctest.Wait()
		want := map[string][]int32{}
		for _, pod := range []string{"p", "q"} {
			for _, claim := range []string{"mine", "ours"} {
				for _, reason := range []string{podevents.ReasonLostRace, podevents.ReasonClaimFull} {
					want["Normal "+reason+" "+pod+" "+claim] = []int32{attempts}
				}
			}
		}
		if diff := cmp.Diff(want, server.counts()); diff != "" {
			t.Errorf("events and how often they were seen (-want +got):\n%s", diff)
		}
	})
}

// The event of devices that have to be made ready is about the pod and one claim, whatever has been written of the pod.
func TestTheEventOfPendingDevicesIsOfPodAndClaim(t *testing.T) {
	w := twoNodes()
	w.objects = append(w.objects[:1:1], slice("node-a", device("gpu-0", func(d *resourceapi.Device) {
		d.BindingConditions, d.BindingFailureConditions = []string{"Attached"}, []string{"Broken"}
	})))
	w.claims = []*resourceapi.ResourceClaim{claim("c")}
	h := newHarness(t, w)
	recorder := objects{of: make(chan [2]runtime.Object, 1)}
	h.plugin.handle = handleWithRecorder{h.plugin.handle, recorder}
	h.plugin.binder.Events = h.plugin.handle.EventRecorder
	p := pod("p", "c")
	p.ResourceVersion = "7"
	a := h.filterAll(p).reserve("node-a")
	ctx, cancel := context.WithCancel(h.ctx)
	done := make(chan *fwk.Status)
	go func() { done <- h.plugin.PreBind(ctx, a.state, p, "node-a") }()
	got := <-recorder.of
	cancel()
	<-done
	want := [2]runtime.Object{
		&v1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: p.UID},
		podevents.Claim(types.NamespacedName{Namespace: testNamespace, Name: "c"}),
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("objects of the event (-want +got):\n%s", diff)
	}
}

// The event of a pod that PreEnqueue keeps back is about the pod, whatever has been written of it.
func TestTheEventOfAPodThatIsKeptBackIsOfThePod(t *testing.T) {
	p := pod("p", "missing")
	p.Spec.SchedulerName, p.ResourceVersion = "second", "7"
	h := newHarness(t, world{pods: []*v1.Pod{p}})
	recorder := objects{of: make(chan [2]runtime.Object, 1)}
	h.plugin.shared.gated.Serve(secondProfile{handleWithRecorder{h.plugin.handle, recorder}}, h.plugin.holdings.GiveUpKeptBack)
	h.leads().plugin.PreEnqueue(h.ctx, p)
	want := [2]runtime.Object{
		&v1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: p.UID},
		podevents.Claim(types.NamespacedName{Namespace: testNamespace, Name: "missing"}),
	}
	if diff := cmp.Diff(want, <-recorder.of); diff != "" {
		t.Errorf("objects of the event (-want +got):\n%s", diff)
	}
}

// secondProfile is the handle of a profile named "second", whose events are recorded.
type secondProfile struct{ handleWithRecorder }

func (secondProfile) ProfileName() string { return "second" }

type handleWithRecorder struct {
	fwk.Handle
	recorder events.EventRecorderLogger
}

func (h handleWithRecorder) EventRecorder() events.EventRecorderLogger { return h.recorder }

// objects records what events are about, as the broadcaster looks at it.
type objects struct {
	events.EventRecorderLogger
	of chan [2]runtime.Object
}

func (o objects) WithLogger(klog.Logger) events.EventRecorderLogger { return o }

func (o objects) Eventf(regarding, related runtime.Object, _, _, _, _ string, _ ...any) {
	o.of <- [2]runtime.Object{regarding, related}
}
