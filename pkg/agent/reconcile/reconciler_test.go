// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2/ktesting"
	clocktesting "k8s.io/utils/clock/testing"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// scene is a reconciler whose sources say what the test wants.
type scene struct {
	t          *testing.T
	clock      *clocktesting.FakeClock
	ledger     *ledger.Ledger
	reconciler *Reconciler

	claim      *resourceapi.ResourceClaim
	pods       []corev1.Pod
	podLists   int
	kubelet    []KubeletPod
	registered time.Time
	running    map[types.UID]bool
	// processes by GPU, or by GPU and place, such as "gpu-0@4".
	processes map[string]int
	// boot is the machine's boot ID.
	boot string
	// foreign are processes of no pod that was named, asked what it was asked for.
	foreign  int
	asked    []string
	strays   []cdi.File
	removed  []types.UID
	released []types.UID
	noted    []types.UID
	repaired int
	summary  Summary
	// preparedAgain: between the decision and the release the record becomes another one.
	preparedAgain bool

	claimErr, runningErr, repairErr, processesErr, releaseErr, straysErr, removeErr, noteErr error
}

func newScene(t *testing.T) *scene {
	t.Helper()
	records, err := ledger.Open(durable.OS{}, filepath.Join(t.TempDir(), "claims"))
	if err != nil {
		t.Fatal(err)
	}
	s := &scene{t: t, clock: clocktesting.NewFakeClock(noon), ledger: records, registered: noon.Add(-time.Hour), processes: map[string]int{}}
	s.reconciler = New(Options{
		Clock:  s.clock,
		Ledger: records,
		Sources: Sources{
			Claim: func(_ context.Context, _, name string) (*resourceapi.ResourceClaim, error) {
				// As client-go does, with an error an object comes, too.
				if s.claimErr != nil {
					return &resourceapi.ResourceClaim{}, s.claimErr
				}
				if s.claim == nil || name != s.claim.Name {
					return &resourceapi.ResourceClaim{}, apierrors.NewNotFound(schema.GroupResource{Resource: "resourceclaims"}, name)
				}
				return s.claim, nil
			},
			Pods:       func(context.Context) ([]corev1.Pod, error) { s.podLists++; return s.pods, nil },
			Kubelet:    func(context.Context) ([]KubeletPod, error) { return s.kubelet, nil },
			Registered: func() time.Time { return s.registered },
			Running:    func(context.Context) (map[types.UID]bool, error) { return s.running, s.runningErr },
			Processes:  s.count,
			ProcessesBut: func(_ context.Context, gpu string, pods []types.UID) (int, error) {
				s.asked = append(s.asked, fmt.Sprint(gpu, pods))
				return s.foreign, s.processesErr
			},
			BootID: func() (string, error) { return s.boot, nil },
			PlaceOf: func(device string) (string, *ledger.Partition) {
				gpu, at, _ := strings.Cut(device, "-mig-")
				if start, err := strconv.Atoi(at); err == nil {
					return gpu, place(uint32(start))
				}
				return gpu, nil
			},
		},
		Repair: func(context.Context) error { s.repaired++; return s.repairErr },
		Strays: func() ([]cdi.File, error) { return slices.Clone(s.strays), s.straysErr },
		RemoveStray: func(_ context.Context, uid types.UID) error {
			if s.removeErr != nil {
				return s.removeErr
			}
			s.removed = append(s.removed, uid)
			s.strays = slices.DeleteFunc(s.strays, func(f cdi.File) bool { return f.Claim == uid })
			return nil
		},
		NotePods: func(_ context.Context, claim *resourceapi.ResourceClaim) error {
			s.noted = append(s.noted, claim.UID)
			return s.noteErr
		},
		Release: func(_ context.Context, seen *ledger.Entry) (bool, error) {
			if s.releaseErr != nil || s.preparedAgain {
				return false, s.releaseErr
			}
			s.released = append(s.released, seen.Claim.UID)
			return true, records.Remove(seen.Claim.UID)
		},
		Seen: func(summary Summary) { s.summary = summary },
	})
	e := entry()
	e.Devices[0].CDIDeviceIDs = []string{"k8s.gpu.nvidia.com/claim=x"}
	if err := records.Put(e); err != nil {
		t.Fatal(err)
	}
	return s
}

// place is one memory slice of a GPU.
func place(start uint32) *ledger.Partition { return &ledger.Partition{Start: start, Size: 1} }

// count is NVML's answer: a process that is in no place is in any.
func (s *scene) count(_ context.Context, gpu string, at ...*ledger.Partition) (n int, err error) {
	for on, processes := range s.processes {
		on, where, _ := strings.Cut(on, "@")
		if on == gpu && (where == "" || slices.ContainsFunc(at, func(p *ledger.Partition) bool { return p == nil || fmt.Sprint(p.Start) == where })) {
			n += processes
		}
	}
	return n, s.processesErr
}

// look lets a minute pass and looks.
func (s *scene) look() error {
	s.t.Helper()
	_, ctx := ktesting.NewTestContext(s.t)
	s.clock.Step(Interval)
	return s.reconciler.Once(ctx)
}

func (s *scene) want(what string, summary Summary, released ...types.UID) {
	s.t.Helper()
	if diff := cmp.Diff(summary, s.summary); diff != "" {
		s.t.Errorf("%s: summary (-want +got):\n%s", what, diff)
	}
	if diff := cmp.Diff(released, s.released); diff != "" {
		s.t.Errorf("%s: released (-want +got):\n%s", what, diff)
	}
}

// TestALeftoverShareIsReleasedBesideTheOthers: their processes and their daemon do not keep it.
func TestALeftoverShareIsReleasedBesideTheOthers(t *testing.T) {
	s := newScene(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	put := func(claim types.UID, share *ledger.Share, pods ...types.UID) {
		e := entry()
		e.Claim.UID, e.Claim.Name, e.Pods = claim, string(claim), pods
		e.Devices[0].Share, e.Devices[0].CDIDeviceIDs = share, []string{"k8s.gpu.nvidia.com/claim=x"}
		must(s.reconciler.opts.Ledger.Put(e))
	}
	must(s.reconciler.opts.Ledger.Remove("claim-uid"))
	put("gone", &ledger.Share{}, "pod-gone")
	put("other", &ledger.Share{}, "pod-1", "pod-2")
	s.claim = claimWith("other", "gpu-0")
	s.claim.Name = "other"
	s.processes["gpu-0"], s.foreign = 3, 1
	must(s.look())
	must(s.look())
	s.want("a process of nobody's", Summary{Occupied: []Held{{GPU: "gpu-0", Claim: ledger.Claim{UID: "gone", Namespace: "default", Name: "gone"}}}})
	s.foreign = 0
	must(s.look())
	must(s.look())
	s.want("processes of the other alone", Summary{Released: 1}, "gone")
	for _, asked := range s.asked {
		if asked != "gpu-0[pod-1 pod-2]" {
			t.Errorf("asked for processes on %s, want those of none of the other's pods", asked)
		}
	}
	// The last one is alone: all processes count.
	s.claim, s.asked = nil, nil
	must(s.look())
	must(s.look())
	if s.want("the last", Summary{Occupied: []Held{{GPU: "gpu-0", Claim: ledger.Claim{UID: "other", Namespace: "default", Name: "other"}}}}, "gone"); len(s.asked) > 0 {
		t.Errorf("asked %q", s.asked)
	}
}

// TestALeftoverPartitionIsReleasedBesideTheOthers: what computes in other partitions of its GPU is no sign that it is in use, and what
// it holds meanwhile is its place, not the GPU.
func TestALeftoverPartitionIsReleasedBesideTheOthers(t *testing.T) {
	s := newScene(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	e := entry()
	e.Devices = []ledger.Device{
		{Pool: "node-1", Device: "a", GPU: "gpu-0", Partition: place(0), CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=a"}},
		{Pool: "node-1", Device: "b", GPU: "gpu-0", Partition: place(2), CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=b"}},
		{Pool: "node-1", Device: "c", GPU: "gpu-1", CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=c"}},
		{Pool: "node-1", Device: "d", GPU: "gpu-0", AdminAccess: true, CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=d"}},
	}
	must(s.ledger.Remove(e.Claim.UID))
	must(s.ledger.Put(e))
	held := []Held{{GPU: "gpu-0", At: place(0), Claim: e.Claim}, {GPU: "gpu-0", At: place(2), Claim: e.Claim}, {GPU: "gpu-1", Claim: e.Claim}}
	s.processes["gpu-0@1"] = 2
	for _, where := range []string{"gpu-0@0", "gpu-0@2", "gpu-1@4", "gpu-0"} {
		s.processes[where] = 1
		must(s.look())
		must(s.look())
		s.want("a process in "+where, Summary{Occupied: held})
		delete(s.processes, where)
	}
	must(s.look())
	must(s.look())
	s.want("processes in another partition alone", Summary{Released: 1}, e.Claim.UID)
}

func TestLeftoversAreReleasedAfterTwoReadings(t *testing.T) {
	s := newScene(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	occupied := []Held{{GPU: "gpu-0", Claim: entry().Claim}}

	s.claim = claimWith("claim-uid", "gpu-0")
	must(s.look())
	must(s.look())
	s.want("allocated", Summary{})
	if s.podLists != 0 {
		t.Errorf("pods were listed %d times without need", s.podLists)
	}

	// A pod of a deleted claim still runs, and then only its process.
	s.claim = nil
	s.pods = []corev1.Pod{podWith("pod", corev1.PodPending, byName)}
	must(s.look())
	must(s.look())
	s.want("a pod has it", Summary{Occupied: occupied})
	s.pods, s.processes["gpu-0"] = nil, 1
	must(s.look())
	must(s.look())
	s.want("a process is left", Summary{Occupied: occupied})

	// Nobody: after the second reading, unless somebody is back between.
	s.processes["gpu-0"] = 0
	must(s.look())
	s.want("once", Summary{Occupied: occupied})
	s.processes["gpu-0"] = 1
	must(s.look())
	s.processes["gpu-0"] = 0
	must(s.look())
	s.want("once again", Summary{Occupied: occupied})
	s.releaseErr = errors.New("disk full")
	if err := s.look(); !errors.Is(err, s.releaseErr) {
		t.Errorf("a release that fails: %v", err)
	}
	s.want("not released", Summary{Occupied: occupied})
	s.releaseErr = nil
	// Somebody has it prepared while it is decided on: nothing of before counts.
	s.preparedAgain = true
	must(s.look())
	s.want("prepared again", Summary{})
	s.preparedAgain = false
	must(s.look())
	s.want("once since then", Summary{Occupied: occupied})
	must(s.look())
	s.want("released", Summary{Released: 1}, "claim-uid")
	must(s.look())
	s.want("gone", Summary{}, "claim-uid")
	if s.repaired != 14 {
		t.Errorf("repaired %d times, want each time", s.repaired)
	}
	if len(s.reconciler.before) > 0 || len(s.reconciler.said) > 0 {
		t.Errorf("remembered for ever: %v, %v", s.reconciler.before, s.reconciler.said)
	}
}

// TestNobodyUsesWhatAnEarlierBootPrepared: nothing of it runs, so a GPU that does not tell who uses it does not keep it for ever.
func TestNobodyUsesWhatAnEarlierBootPrepared(t *testing.T) {
	for _, tc := range []struct {
		prepared, now string
		released      bool
	}{
		{"boot-1", "boot-2", true},
		{"boot-1", "boot-1", false},
		{"", "boot-2", false}, // an earlier agent did not record it
		{"boot-1", "", false},
	} {
		s := newScene(t)
		e := entry()
		e.BootID, e.Devices[0].CDIDeviceIDs = tc.prepared, []string{"k8s.gpu.nvidia.com/claim=x"}
		if err := s.reconciler.opts.Ledger.Put(e); err != nil {
			t.Fatal(err)
		}
		s.boot, s.processesErr = tc.now, errors.New("the GPU is lost")
		for range 2 {
			if err := s.look(); err != nil {
				t.Fatal(err)
			}
		}
		if got := len(s.released) == 1; got != tc.released {
			t.Errorf("prepared in %q, now %q: released %v, want %v", tc.prepared, tc.now, s.released, tc.released)
		}
	}
}

func TestAClaimThatCannotBeReadIsKept(t *testing.T) {
	s := newScene(t)
	records, err := os.ReadDir(s.ledger.Dir())
	if err != nil || len(records) != 1 {
		t.Fatalf("ledger: %v, %v", records, err)
	}
	if err := os.WriteFile(filepath.Join(s.ledger.Dir(), records[0].Name()), []byte("torn"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 4 {
		if err := s.look(); err != nil {
			t.Fatal(err)
		}
	}
	// Whoever has it allocated has it; to the scheduler it may be free, and nobody else could have it prepared.
	s.want("unreadable", Summary{Unreadable: []types.UID{"claim-uid"}, Occupied: []Held{{GPU: "gpu-0", Claim: ledger.Claim{UID: "claim-uid"}, Why: Unread}}})
	if err := os.Rename(filepath.Join(s.ledger.Dir(), records[0].Name()), filepath.Join(s.ledger.Dir(), "claim-uid_all.claim")); err != nil {
		t.Fatal(err)
	}
	if err := s.look(); err != nil {
		t.Fatal(err)
	}
	s.want("unreadable, of more GPUs than can be listed", Summary{Unreadable: []types.UID{"claim-uid"}, Occupied: []Held{{GPU: "", Claim: ledger.Claim{UID: "claim-uid"}, Why: Unread}}})
}

// TestWhatWasNeverKnownIsOccupied: an agent that starts without the API server cannot tell a claim from one that is not allocated any more. Nobody
// else is asked.
func TestWhatWasNeverKnownIsOccupied(t *testing.T) {
	s := newScene(t)
	s.claimErr = errors.New("away")
	for range 3 {
		if err := s.look(); err != nil {
			t.Fatal(err)
		}
	}
	s.want("away", Summary{Unknown: 1, Occupied: []Held{{GPU: "gpu-0", Claim: entry().Claim, Why: Unknown}}})
	if s.podLists != 0 {
		t.Errorf("pods were listed %d times without need", s.podLists)
	}
	s.claimErr, s.claim = nil, claimWith("claim-uid", "gpu-0")
	if err := s.look(); err != nil {
		t.Fatal(err)
	}
	s.want("it is allocated", Summary{})
}

// TestWhatWasOccupiedStaysSo while the API server does not tell that it is not any more.
func TestWhatWasOccupiedStaysSo(t *testing.T) {
	s := newScene(t)
	s.processes["gpu-0"] = 1
	occupied := Summary{Occupied: []Held{{GPU: "gpu-0", Claim: entry().Claim}}}
	for _, step := range []struct {
		what  string
		err   error
		claim *resourceapi.ResourceClaim
		want  Summary
	}{
		{"not allocated", nil, nil, occupied},
		{"the API server is away", errors.New("away"), nil, occupied},
		{"allocated again", nil, claimWith("claim-uid", "gpu-0"), Summary{}},
		{"away again", errors.New("away"), nil, Summary{}},
	} {
		s.claimErr, s.claim = step.err, step.claim
		if err := s.look(); err != nil {
			t.Fatal(err)
		}
		s.want(step.what, step.want)
	}
}

// TestEverySourceKeepsAClaim: what a source says, or that it does not, comes through to the decision.
func TestEverySourceKeepsAClaim(t *testing.T) {
	for name, change := range map[string]func(*scene){
		"the kubelet has it": func(s *scene) {
			s.kubelet = []KubeletPod{{Namespace: "default", Name: "pod", Claims: []string{"claim"}}}
		},
		"NVML does not answer":           func(s *scene) { s.processesErr = errors.New("hung") },
		"a pod that is gone runs":        func(s *scene) { s.running = map[types.UID]bool{"gone-uid": true} },
		"it is not known what runs":      func(s *scene) { s.runningErr = errors.New("no table") },
		"the kubelet has not registered": func(s *scene) { s.registered = time.Time{} },
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			change(s)
			for range 4 {
				if err := s.look(); err != nil {
					t.Fatal(err)
				}
			}
			s.want(name, Summary{Occupied: []Held{{GPU: "gpu-0", Claim: entry().Claim}}})
		})
	}
}

// TestTheTimeBetweenTwoReadingsCounts, and not their number; when the kubelet starts between, it begins anew.
func TestTheTimeBetweenTwoReadingsCounts(t *testing.T) {
	s := newScene(t)
	_, ctx := ktesting.NewTestContext(t)
	after := func(wait time.Duration) int {
		t.Helper()
		s.clock.Step(wait)
		if err := s.reconciler.Once(ctx); err != nil {
			t.Fatal(err)
		}
		return len(s.released)
	}
	if after(0) != 0 || after(Interval-time.Second) != 0 {
		t.Fatal("released too early")
	}
	s.registered = s.clock.Now()
	// The first reading that counts is one a settled kubelet was asked for.
	if after(time.Second) != 0 || after(settle) != 0 {
		t.Fatal("released soon after a start of the kubelet")
	}
	if after(Interval-2*time.Second) != 0 {
		t.Fatal("released too early after a start of the kubelet")
	}
	if after(2*time.Second) != 1 {
		t.Error("not released although a minute has passed")
	}
}

// TestAClaimThatComesBackIsLookedAtAnew: what was seen of it before it was released says nothing about it now.
func TestAClaimThatComesBackIsLookedAtAnew(t *testing.T) {
	s := newScene(t)
	again := entry()
	again.Devices[0].CDIDeviceIDs = []string{"k8s.gpu.nvidia.com/claim=x"}
	if err := errors.Join(s.look(), s.look(), s.ledger.Put(again), s.look()); err != nil {
		t.Fatal(err)
	}
	s.want("prepared again", Summary{Occupied: []Held{{GPU: "gpu-0", Claim: entry().Claim}}}, "claim-uid")
}

// TestWhoIsGoneIsForgotten: the kubelet has unprepared the claim after all.
func TestWhoIsGoneIsForgotten(t *testing.T) {
	s := newScene(t)
	s.strays = []cdi.File{{Claim: "lost", Devices: []string{"gpu-1"}}}
	if err := s.look(); err != nil {
		t.Fatal(err)
	}
	if len(s.reconciler.before) != 2 || len(s.reconciler.said) != 2 || len(s.reconciler.orphans) != 1 {
		t.Errorf("remembered: %v, %v, %v; want a claim and a file", s.reconciler.before, s.reconciler.said, s.reconciler.orphans)
	}
	s.strays = nil
	if err := errors.Join(s.ledger.Remove("claim-uid"), s.look()); err != nil {
		t.Fatal(err)
	}
	if len(s.reconciler.before) > 0 || len(s.reconciler.said) > 0 || len(s.reconciler.orphans) > 0 {
		t.Errorf("remembered for ever: %v, %v, %v", s.reconciler.before, s.reconciler.said, s.reconciler.orphans)
	}
}

// TestErrorsDoNotStopTheRest: what cannot be repaired or read is said; the claims are looked at all the same.
func TestErrorsDoNotStopTheRest(t *testing.T) {
	s := newScene(t)
	s.repairErr, s.straysErr = errors.New("repair"), errors.New("strays")
	for range 2 {
		if err := s.look(); !errors.Is(err, s.repairErr) || !errors.Is(err, s.straysErr) {
			t.Errorf("error %v, want both", err)
		}
	}
	s.want("released", Summary{Released: 1}, "claim-uid")
	if err := os.RemoveAll(s.ledger.Dir()); err != nil {
		t.Fatal(err)
	}
	if err := s.look(); !errors.Is(err, os.ErrNotExist) || !errors.Is(err, s.repairErr) {
		t.Errorf("without a ledger: %v", err)
	}
}

// TestARepairThatHangsTakesNoTimeOfTheRest, and does not keep the next look back.
func TestARepairThatHangsTakesNoTimeOfTheRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t)
		s.reconciler.opts.Repair = func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		}
		claim := s.reconciler.opts.Sources.Claim
		s.reconciler.opts.Sources.Claim = func(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			return claim(ctx, namespace, name)
		}
		began := time.Now()
		for range 2 {
			if err := s.look(); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("error %v, want that of the repair", err)
			}
		}
		if took := time.Since(began); took >= 2*Interval {
			t.Errorf("two looks took %s", took)
		}
		s.want("released", Summary{Released: 1}, "claim-uid")
	})
}

// TestPodsOfNowAreRecorded of a claim that is allocated, and of no other: another one of its name has pods of its own.
func TestPodsOfNowAreRecorded(t *testing.T) {
	s := newScene(t)
	s.claim, s.noteErr = claimWith("claim-uid", "gpu-0"), errors.New("disk full")
	if err := s.look(); !errors.Is(err, s.noteErr) {
		t.Errorf("error %v, want %v", err, s.noteErr)
	}
	s.claimErr = errors.New("API server away")
	if err := s.look(); err != nil {
		t.Error(err)
	}
	s.claim, s.claimErr = claimWith("another-uid", "gpu-0"), nil
	if err := s.look(); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]types.UID{"claim-uid"}, s.noted); diff != "" {
		t.Errorf("noted (-want +got):\n%s", diff)
	}
}

// TestWhatOthersHaveIsNoProof: only shares of the same GPU have others' processes on it.
func TestWhatOthersHaveIsNoProof(t *testing.T) {
	for name, tc := range map[string]struct {
		other ledger.Device
		torn  bool
	}{
		"a share of another GPU":          {other: ledger.Device{GPU: "gpu-1", Share: &ledger.Share{}}},
		"the GPU, which is not in shares": {other: ledger.Device{GPU: "gpu-0"}},
		"what cannot be read":             {other: ledger.Device{GPU: "gpu-0", Share: &ledger.Share{}}, torn: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			other := entry()
			other.Claim.UID, other.Claim.Name, other.Devices = "other", "other", []ledger.Device{tc.other}
			if err := s.ledger.Put(other); err != nil {
				t.Fatal(err)
			}
			if tc.torn {
				record, err := s.ledger.Get("other")
				if err := errors.Join(err, os.WriteFile(record.Path, []byte("torn"), 0o600)); err != nil {
					t.Fatal(err)
				}
			}
			// The other one is allocated, and its pod runs nothing.
			s.claim = claimWith("other", tc.other.Device)
			s.claim.Name, s.claim.Status.Allocation.Devices.Results[0].Pool = "other", tc.other.Pool
			s.processes["gpu-0"] = 1
			if err := errors.Join(s.look(), s.look()); err != nil {
				t.Fatal(err)
			}
			if len(s.released) > 0 || len(s.asked) > 0 {
				t.Errorf("released %v, asked %v", s.released, s.asked)
			}
			s.processes["gpu-0"] = 0
			if err := errors.Join(s.look(), s.look()); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]types.UID{"claim-uid"}, s.released); diff != "" {
				t.Errorf("released (-want +got):\n%s", diff)
			}
		})
	}
}

// TestWhatIsHeldTwiceIsToldOnce: two shares of a GPU hold it.
func TestWhatIsHeldTwiceIsToldOnce(t *testing.T) {
	s := newScene(t)
	e := entry()
	e.Devices[0].Share = &ledger.Share{}
	e.Devices = append(e.Devices, e.Devices[0])
	if err := errors.Join(s.ledger.Put(e), s.look()); err != nil {
		t.Fatal(err)
	}
	s.want("two shares of a GPU", Summary{Occupied: []Held{{GPU: "gpu-0", Claim: e.Claim}}})
}

// TestWhatWasPreparedSinceTheStartWasAllocatedThen: while the API server is away it is not occupied, also where its claim was thought to be left.
func TestWhatWasPreparedSinceTheStartWasAllocatedThen(t *testing.T) {
	for name, left := range map[string]bool{"never seen": false, "seen as left": true} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			if left {
				s.preparedAgain = true
				if err := errors.Join(s.look(), s.look()); err != nil {
					t.Fatal(err)
				}
			}
			again := entry()
			again.Updated = s.clock.Now()
			s.claimErr = errors.New("away")
			if err := errors.Join(s.ledger.Put(again), s.look()); err != nil {
				t.Fatal(err)
			}
			s.want("away", Summary{})
		})
	}
}
