package reconcile

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
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
