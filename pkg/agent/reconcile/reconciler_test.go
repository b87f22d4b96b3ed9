package reconcile

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2/ktesting"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	clocktesting "k8s.io/utils/clock/testing"

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
	processes  int
	releaseErr error
	released   []types.UID
	repaired   int
	summary    Summary
}

func newScene(t *testing.T) *scene {
	t.Helper()
	records, err := ledger.Open(durable.OS{}, filepath.Join(t.TempDir(), "claims"))
	if err != nil {
		t.Fatal(err)
	}
	s := &scene{t: t, clock: clocktesting.NewFakeClock(noon), ledger: records}
	s.reconciler = New(Options{
		Clock:  s.clock,
		Ledger: records,
		Sources: Sources{
			Claim: func(_ context.Context, _, name string) (*resourceapi.ResourceClaim, error) {
				if s.claim == nil {
					return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "resourceclaims"}, name)
				}
				return s.claim, nil
			},
			Pods:       func(context.Context) ([]corev1.Pod, error) { s.podLists++; return s.pods, nil },
			Kubelet:    func(context.Context) ([]KubeletPod, error) { return nil, nil },
			Registered: func() time.Time { return noon.Add(-time.Hour) },
			Processes:  func(context.Context, string) (int, error) { return s.processes, nil },
		},
		Repair: func(context.Context) error { s.repaired++; return nil },
		Release: func(_ context.Context, uid types.UID) error {
			if s.releaseErr != nil {
				return s.releaseErr
			}
			s.released = append(s.released, uid)
			return records.Remove(uid)
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

func TestLeftoversAreReleasedAfterTwoReadings(t *testing.T) {
	s := newScene(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	occupied := map[string]ledger.Claim{"gpu-0": entry().Claim}
	free := map[string]ledger.Claim{}

	s.claim = claimWith("claim-uid", "gpu-0")
	must(s.look())
	must(s.look())
	s.want("allocated", Summary{Completed: 1, Occupied: free})
	if s.podLists != 0 {
		t.Errorf("pods were listed %d times without need", s.podLists)
	}

	// A pod of a deleted claim still runs, and then only its process.
	s.claim = nil
	s.pods = []corev1.Pod{podWith("pod", corev1.PodPending, byName)}
	must(s.look())
	must(s.look())
	s.want("a pod has it", Summary{Completed: 1, Occupied: occupied})
	s.pods, s.processes = nil, 1
	must(s.look())
	must(s.look())
	s.want("a process is left", Summary{Completed: 1, Occupied: occupied})

	// Nobody: after the second reading, unless somebody is back between.
	s.processes = 0
	must(s.look())
	s.want("once", Summary{Completed: 1, Occupied: occupied})
	s.processes = 1
	must(s.look())
	s.processes = 0
	must(s.look())
	s.want("once again", Summary{Completed: 1, Occupied: occupied})
	s.releaseErr = errors.New("disk full")
	if err := s.look(); !errors.Is(err, s.releaseErr) {
		t.Errorf("a release that fails: %v", err)
	}
	s.want("not released", Summary{Completed: 1, Occupied: occupied})
	s.releaseErr = nil
	must(s.look())
	s.want("released", Summary{Completed: 1, Released: 1, Occupied: free}, "claim-uid")
	must(s.look())
	s.want("gone", Summary{Occupied: free}, "claim-uid")
	if s.repaired != 12 {
		t.Errorf("repaired %d times, want each time", s.repaired)
	}
	if len(s.reconciler.before) > 0 || len(s.reconciler.said) > 0 {
		t.Errorf("remembered for ever: %v, %v", s.reconciler.before, s.reconciler.said)
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
	s.want("unreadable", Summary{Unreadable: 1, Occupied: map[string]ledger.Claim{}})
}

// kubelet is the PodResources service.
type kubelet struct {
	podresources.UnimplementedPodResourcesListerServer
}

func (*kubelet) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	return &podresources.ListPodResourcesResponse{PodResources: []*podresources.PodResources{{
		Namespace: "default", Name: "pod",
		Containers: []*podresources.ContainerResources{
			{Name: "a", DynamicResources: []*podresources.DynamicResource{{ClaimName: "one"}}},
			{Name: "b", DynamicResources: []*podresources.DynamicResource{{ClaimName: "two"}}},
		},
	}}}, nil
}

func TestWhatTheKubeletRunsIsRead(t *testing.T) {
	dir, err := os.MkdirTemp("", "kubelet")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "kubelet.sock")
	if _, err := KubeletAt(socket)(t.Context()); err == nil {
		t.Error("a kubelet that is not there answers")
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	podresources.RegisterPodResourcesListerServer(server, &kubelet{})
	done := make(chan error)
	go func() { done <- server.Serve(listener) }()
	defer func() { server.Stop(); <-done }()
	pods, err := KubeletAt(socket)(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]KubeletPod{{Namespace: "default", Name: "pod", Claims: []string{"one", "two"}}}, pods); diff != "" {
		t.Errorf("pods (-want +got):\n%s", diff)
	}
}
