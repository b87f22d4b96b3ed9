// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/cdi"
)

// The proof for a claim whose record cannot be read: two looks, and nobody uses it. A pod that is being deleted has ended when its processes have;
// the kubelet cannot say so as long as the claim is not unprepared.
func TestWhoUsesAClaimThatCannotBeReadIsFound(t *testing.T) {
	deleted := func(phase corev1.PodPhase) corev1.Pod {
		pod := podWith("pod", phase, byName)
		pod.DeletionTimestamp = &metav1.Time{Time: noon}
		return pod
	}
	tests := map[string]struct {
		change func(*scene)
		ended  bool
		keep   string // at the second look
	}{
		"nobody": {change: func(*scene) {}},
		"a pod that is being deleted and has no process": {change: func(s *scene) { s.pods = []corev1.Pod{deleted(corev1.PodRunning)} }, ended: true},
		"one that the kubelet lists still": {change: func(s *scene) {
			s.pods = []corev1.Pod{deleted(corev1.PodRunning)}
			s.kubelet = []KubeletPod{{Namespace: "default", Name: "pod", CDIClaims: []types.UID{entry().Claim.UID}}}
		}, ended: true},
		"one beside others that the kubelet lists": {change: func(s *scene) {
			s.pods = []corev1.Pod{deleted(corev1.PodRunning)}
			s.kubelet = []KubeletPod{
				{Namespace: "default", Name: "pod", CDIClaims: []types.UID{entry().Claim.UID}}, {Namespace: "default", Name: "other", CDIClaims: []types.UID{entry().Claim.UID}},
			}
		}, ended: true, keep: "the kubelet has it for pod default/other"},
		"one whose name the kubelet lists elsewhere": {change: func(s *scene) {
			s.pods = []corev1.Pod{deleted(corev1.PodRunning)}
			s.kubelet = []KubeletPod{{Namespace: "elsewhere", Name: "pod", CDIClaims: []types.UID{entry().Claim.UID}}}
		}, ended: true, keep: "the kubelet has it for pod elsewhere/pod"},
		"nobody knows what has ended, nor what runs": {change: func(s *scene) {
			s.pods = []corev1.Pod{deleted(corev1.PodPending)}
			s.reconciler.opts.Sources.Ended, s.reconciler.opts.Sources.Running = nil, nil
		}, keep: "pod default/pod uses it and has not ended"},
		"one that has processes": {
			change: func(s *scene) { s.pods = []corev1.Pod{deleted(corev1.PodPending)} }, keep: "pod default/pod uses it and has not ended",
		},
		"one that is not being deleted": {
			change: func(s *scene) { s.pods = []corev1.Pod{podWith("pod", corev1.PodPending, byName)} }, ended: true,
			keep: "pod default/pod uses it and has not ended",
		},
		"a process": {change: func(s *scene) { s.processes[entry().HeldGPUs()[0]] = 2 }, keep: "2 processes are on its devices"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			s.claim = claimWith(entry().Claim.UID, "gpu-0")
			s.reconciler.opts.Sources.Ended = func(context.Context, *corev1.Pod) bool { return tc.ended }
			files, err := filepath.Glob(filepath.Join(s.ledger.Dir(), "*"))
			if err != nil || len(files) == 0 {
				t.Fatal(files, err)
			}
			for _, file := range files {
				if err := os.Truncate(file, 7); err != nil {
					t.Fatal(err)
				}
			}
			tc.change(s)
			first, err := s.reconciler.Look(t.Context(), entry().Claim.UID, nil)
			if err != nil || tc.keep == "" && first != LookedOnce {
				t.Errorf("first look: %q, %v", first, err)
			}
			s.clock.Step(Interval)
			keep, err := s.reconciler.Look(t.Context(), entry().Claim.UID, nil)
			if err != nil || keep != tc.keep {
				t.Errorf("second look: %q, %v, want %q", keep, err, tc.keep)
			}
		})
	}
}

// TestOneClaimIsLookedAt, whatever there is of it: its record, its CDI file, its file's name.
func TestOneClaimIsLookedAt(t *testing.T) {
	torn := func(s *scene, name string) {
		record, err := s.ledger.Get(entry().Claim.UID)
		if err := errors.Join(err, os.Rename(record.Path, filepath.Join(s.ledger.Dir(), name))); err != nil {
			s.t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(s.ledger.Dir(), name), []byte("torn"), 0o600); err != nil {
			s.t.Fatal(err)
		}
	}
	const one, all = "claim-uid_gpu-0.claim", "claim-uid_all.claim"
	for name, tc := range map[string]struct {
		change func(*scene)
		files  []cdi.File
		want   [2]string
	}{
		"its record":                      {func(*scene) {}, nil, [2]string{LookedOnce}},
		"its record, with a process":      {func(s *scene) { s.processes["gpu-0"] = 1 }, nil, [2]string{"1 processes are on its devices", "1 processes are on its devices"}},
		"its record, and it is allocated": {func(s *scene) { s.claim = claimWith("claim-uid", "gpu-0") }, nil, [2]string{"the claim is allocated", "the claim is allocated"}},
		"no record":                       {func(s *scene) { _ = s.ledger.Remove("claim-uid") }, nil, [2]string{}},
		"its file's name":                 {func(s *scene) { torn(s, one); s.processes["gpu-1"] = 1 }, nil, [2]string{LookedOnce}},
		"its CDI file": {
			func(s *scene) { torn(s, one); s.processes["gpu-1"] = 1 },
			[]cdi.File{{Claim: "claim-uid", Devices: []string{"gpu-1"}}},
			[2]string{"1 processes are on its devices", "1 processes are on its devices"},
		},
		"others' CDI files, and one that cannot be read": {
			func(s *scene) { torn(s, one); s.processes["gpu-1"] = 1 },
			[]cdi.File{{Claim: "other-uid", Devices: []string{"gpu-1"}}, {Claim: "claim-uid", Err: errors.New("torn"), Devices: []string{"gpu-1"}}},
			[2]string{LookedOnce},
		},
		"nothing that names its GPUs":   {func(s *scene) { torn(s, all) }, nil, [2]string{"it is not known which GPUs it holds", "it is not known which GPUs it holds"}},
		"its CDI file alone names them": {func(s *scene) { torn(s, all) }, []cdi.File{{Claim: "claim-uid", Devices: []string{"gpu-1"}}}, [2]string{LookedOnce}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			tc.change(s)
			var got [2]string
			for i := range got {
				var err error
				if got[i], err = s.reconciler.Look(t.Context(), "claim-uid", tc.files); err != nil {
					t.Error(err)
				}
				s.clock.Step(Interval)
			}
			if got != tc.want {
				t.Errorf("two looks: %q, want %q", got, tc.want)
			}
		})
	}
}

// TestEachClaimHasItsOwnLooks: one look at each of two claims is no second look at either.
func TestEachClaimHasItsOwnLooks(t *testing.T) {
	s := newScene(t)
	other := entry()
	other.Claim.UID, other.Claim.Name = "another", "another"
	other.Devices[0].GPU = "gpu-1"
	if err := s.ledger.Put(other); err != nil {
		t.Fatal(err)
	}
	for gpu, claim := range map[string]types.UID{"gpu-0": "claim-uid", "gpu-1": "another"} {
		s.processes = map[string]int{gpu: 1}
		if keep, err := s.reconciler.Look(t.Context(), claim, nil); err != nil || keep != "1 processes are on its devices" {
			t.Errorf("%s, with a process: %q, %v", claim, keep, err)
		}
	}
	s.processes = nil
	for _, claim := range []types.UID{"claim-uid", "another"} {
		if keep, err := s.reconciler.Look(t.Context(), claim, nil); err != nil || keep != LookedOnce {
			t.Errorf("%s: %q, %v", claim, keep, err)
		}
		s.clock.Step(Interval)
	}
	if err := os.RemoveAll(s.ledger.Dir()); err != nil {
		t.Fatal(err)
	}
	if _, err := s.reconciler.Look(t.Context(), "claim-uid", nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a ledger: %v", err)
	}
}
