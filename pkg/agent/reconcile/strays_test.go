// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// lost is the CDI file of a claim that the ledger has lost. It has two devices on one GPU, and one on another.
func lost() cdi.File {
	return cdi.File{Claim: "lost-uid", Devices: []string{"gpu-1-mig-a", "gpu-1-mig-b", "gpu-2"}}
}

// TestACDIFileWithoutARecordIsRemovedOnlyOnProof: each piece of evidence alone keeps it, as long as it is there.
func TestACDIFileWithoutARecordIsRemovedOnlyOnProof(t *testing.T) {
	tests := map[string]struct {
		change func(*scene)
		keep   bool
	}{
		"nobody uses it": {change: func(*scene) {}},
		"a pod has its claim": {change: func(s *scene) {
			s.claim = claimWith("lost-uid", "gpu-1")
			s.pods = []corev1.Pod{podWith("pod", corev1.PodPending, byName)}
		}, keep: true},
		"a pod had its claim and has ended": {change: func(s *scene) {
			s.claim = claimWith("lost-uid", "gpu-1")
			s.pods = []corev1.Pod{podWith("pod", corev1.PodSucceeded, byName)}
		}},
		"its claim is allocated, to pods elsewhere": {change: func(s *scene) { s.claim = claimWith("lost-uid", "gpu-1") }},
		"a pod has another claim": {change: func(s *scene) {
			s.claim = claimWith("other-uid", "gpu-1")
			s.pods = []corev1.Pod{podWith("pod", corev1.PodPending, byName)}
		}},
		"a pod's claim is gone": {change: func(s *scene) { s.pods = []corev1.Pod{podWith("pod", corev1.PodPending, byName)} }},
		"a pod's claim is not known": {change: func(s *scene) {
			s.pods = []corev1.Pod{podWith("pod", corev1.PodPending, byName)}
			s.claimErr = errors.New("away")
		}, keep: true},
		"the kubelet has a device of it": {change: func(s *scene) {
			s.kubelet = []KubeletPod{{Namespace: "default", Name: "pod", CDIClaims: []types.UID{"x", "lost-uid"}}}
		}, keep: true},
		"the kubelet has others' devices": {change: func(s *scene) {
			s.kubelet = []KubeletPod{{Namespace: "default", Name: "pod", CDIClaims: []types.UID{"x"}}}
		}},
		"the kubelet does not list a running pod": {change: func(s *scene) { s.pods = []corev1.Pod{podWith("pod", corev1.PodRunning, nil)} }, keep: true},
		"the kubelet has not registered":          {change: func(s *scene) { s.registered = time.Time{} }, keep: true},
		"a pod that is gone has processes":        {change: func(s *scene) { s.running = map[types.UID]bool{"gone-uid": true} }, keep: true},
		"a pod that has ended has processes": {change: func(s *scene) {
			s.pods, s.running = []corev1.Pod{podWith("pod", corev1.PodFailed, nil)}, map[types.UID]bool{"pod-uid": true}
		}, keep: true},
		"a pod that runs without it has processes": {change: func(s *scene) {
			s.pods, s.running = []corev1.Pod{podWith("pod", corev1.PodRunning, nil)}, map[types.UID]bool{"pod-uid": true}
			s.kubelet = []KubeletPod{{Namespace: "default", Name: "pod"}}
		}},
		"a process is on the last of its GPUs": {change: func(s *scene) { s.processes["gpu-2"] = 1 }, keep: true},
		"a process is on another GPU":          {change: func(s *scene) { s.processes["gpu-3"] = 1 }},
		"a process is in a place of it": {change: func(s *scene) {
			s.processes["gpu-3@4"] = 1
			s.strays[0].Devices = []string{"gpu-3-mig-0", "gpu-3-mig-4"}
		}, keep: true},
		"a process is beside its places": {change: func(s *scene) {
			s.processes["gpu-3@5"] = 1
			s.strays[0].Devices = []string{"gpu-3-mig-0", "gpu-3-mig-4"}
		}},
		"a process is in a place that may be its": {change: func(s *scene) { s.processes["gpu-1@5"] = 1 }, keep: true},
		"NVML does not answer":                    {change: func(s *scene) { s.processesErr = errors.New("hung") }, keep: true},
		"it cannot be read":                       {change: func(s *scene) { s.strays[0].Err = errors.New("torn") }, keep: true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			if err := s.ledger.Remove("claim-uid"); err != nil {
				t.Fatal(err)
			}
			s.strays = []cdi.File{lost()}
			tc.change(s)
			if err := s.look(); err != nil {
				t.Fatal(err)
			}
			if len(s.removed) > 0 || s.summary.Strays != 1 {
				t.Errorf("after one reading: removed %v, summary %+v", s.removed, s.summary)
			}
			if err := s.look(); err != nil {
				t.Fatal(err)
			}
			want, left := []types.UID{"lost-uid"}, 0
			if tc.keep {
				want, left = nil, 1
			}
			if diff := cmp.Diff(want, s.removed); diff != "" {
				t.Errorf("removed (-want +got):\n%s", diff)
			}
			s.want(name, Summary{Strays: left})
		})
	}
}

// TestACDIFileOfAShareGoesWhileOthersShareItsGPU: what they run is no sign of who has no record any more.
func TestACDIFileOfAShareGoesWhileOthersShareItsGPU(t *testing.T) {
	for name, tc := range map[string]struct {
		foreign int
		want    []types.UID
	}{
		"others run":         {want: []types.UID{"lost-uid"}},
		"somebody else runs": {foreign: 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			if err := s.ledger.Remove("claim-uid"); err != nil {
				t.Fatal(err)
			}
			for _, uid := range []types.UID{"one-uid", "two-uid"} {
				e := entry()
				e.Claim.UID, e.Claim.Name, e.Pods = uid, string(uid), []types.UID{"pod-of-" + uid}
				e.Devices[0].Share = &ledger.Share{MemoryBytes: 1}
				if err := s.ledger.Put(e); err != nil {
					t.Fatal(err)
				}
			}
			s.claimErr = errors.New("away") // nothing is concluded about those that have records
			s.strays = []cdi.File{{Claim: "lost-uid", Devices: []string{"gpu-0"}}}
			s.processes["gpu-0"], s.foreign = 2, tc.foreign
			for range 2 {
				if err := s.look(); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(tc.want, s.removed); diff != "" {
				t.Errorf("removed (-want +got):\n%s", diff)
			}
			if want := "gpu-0[pod-of-one-uid pod-of-two-uid]"; len(s.asked) != 2 || s.asked[0] != want {
				t.Errorf("asked for processes of others than %v, want %s twice", s.asked, want)
			}
		})
	}
}

// TestAProcessCountsOnce, although two devices of the file are on its GPU.
func TestAProcessCountsOnce(t *testing.T) {
	s := newScene(t)
	s.strays = []cdi.File{lost()}
	s.processes["gpu-1"] = 3
	if err := s.look(); err != nil {
		t.Fatal(err)
	}
	if got := s.reconciler.said[subject{"lost-uid", true}]; !strings.Contains(got, "3 processes") {
		t.Errorf("it stays because %q, want 3 processes", got)
	}
}

// TestARecordsReadingIsNoneOfItsFile: a record that is lost after its first reading leaves a file that is looked at anew.
func TestARecordsReadingIsNoneOfItsFile(t *testing.T) {
	s := newScene(t)
	if err := errors.Join(s.look(), s.ledger.Remove("claim-uid")); err != nil {
		t.Fatal(err)
	}
	s.strays = []cdi.File{{Claim: "claim-uid", Devices: []string{"gpu-0"}}}
	if err := s.look(); err != nil || len(s.removed) > 0 {
		t.Errorf("after its first reading: removed %v, %v", s.removed, err)
	}
}

func TestAFileThatCannotBeRemovedIsTriedAgain(t *testing.T) {
	s := newScene(t)
	s.strays = []cdi.File{lost()}
	if err := s.look(); err != nil {
		t.Fatal(err)
	}
	s.removeErr = errors.New("read-only")
	if err := s.look(); !errors.Is(err, s.removeErr) {
		t.Errorf("error %v", err)
	}
	if s.summary.Strays != 1 {
		t.Errorf("summary %+v", s.summary)
	}
	s.removeErr = nil
	if err := s.look(); err != nil || len(s.removed) != 1 {
		t.Errorf("removed %v, %v", s.removed, err)
	}
	if len(s.reconciler.before) > 0 || len(s.reconciler.said) > 0 {
		t.Errorf("remembered for ever: %v, %v", s.reconciler.before, s.reconciler.said)
	}
}

// TestWhyAFileStays is said: somebody may have to remove it by hand.
func TestWhyAFileStays(t *testing.T) {
	if keep := fileInUse("lost-uid", &Reading{PodsErr: errors.New("no list"), Registered: noon}); !strings.Contains(keep, "no list") {
		t.Errorf("pods are not known: %q", keep)
	}
	s := newScene(t)
	s.strays = []cdi.File{{Claim: "lost-uid", Err: errors.New("torn")}}
	if err := s.look(); err != nil {
		t.Fatal(err)
	}
	if got := s.reconciler.said[subject{"lost-uid", true}]; !strings.Contains(got, "torn") {
		t.Errorf("a file that cannot be read stays because %q", got)
	}
}

func TestPodsAreThoseOfTheNode(t *testing.T) {
	pod := podWith("pod", corev1.PodRunning, nil)
	client := fake.NewSimpleClientset(&pod)
	pods, err := PodsOf(client, "node-1")(t.Context())
	if err != nil || len(pods) != 1 || pods[0].Name != "pod" {
		t.Errorf("pods %v, %v", pods, err)
	}
	selector := client.Actions()[0].(clienttesting.ListAction).GetListRestrictions().Fields.String()
	if selector != "spec.nodeName=node-1" {
		t.Errorf("listed are pods with %q", selector)
	}
	away := errors.New("away")
	client.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, away })
	if _, err := PodsOf(client, "node-1")(t.Context()); !errors.Is(err, away) {
		t.Errorf("error %v", err)
	}
}
