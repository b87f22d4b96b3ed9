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
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/agent/ledger"
)

func TestWhoUsesAPreparedClaim(t *testing.T) {
	deleted := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	held := &ledger.Entry{Claim: ledger.Claim{UID: "uid", Namespace: "default", Name: "claim"}, Pods: []types.UID{"pod-uid"}}
	object := func(uid types.UID) *resourceapi.ResourceClaim {
		return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim", UID: uid}}
	}
	pod := func(name string, uid types.UID, phase corev1.PodPhase, claim string) corev1.Pod {
		p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: uid}, Status: corev1.PodStatus{Phase: phase}}
		if claim != "" {
			p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &claim}}
		}
		return p
	}
	terminating := pod("p", "pod-uid", corev1.PodRunning, "")
	terminating.DeletionTimestamp, terminating.DeletionGracePeriodSeconds = &metav1.Time{Time: deleted.Add(30 * time.Second)}, ptr.To[int64](30)
	graceless := terminating
	graceless.DeletionGracePeriodSeconds = nil
	const gone = "which is being released: its pod is gone from the API server, and the kubelet has not unprepared it yet"
	tests := map[string]struct {
		reading Reading
		runs    bool
		want    string
	}{
		"its pod runs":                               {Reading{Claim: object("uid"), Pods: []corev1.Pod{pod("p", "pod-uid", corev1.PodRunning, "")}}, true, "used by pod default/p, which runs"},
		"its pod starts":                             {Reading{Claim: object("uid"), Pods: []corev1.Pod{pod("p", "pod-uid", corev1.PodPending, "")}}, true, "used by pod default/p, which is starting"},
		"a pod that came later runs":                 {Reading{Claim: object("uid"), Pods: []corev1.Pod{pod("q", "q-uid", corev1.PodRunning, "claim")}}, true, "used by pod default/q, which runs"},
		"the claim is gone, and its pod runs":        {Reading{Pods: []corev1.Pod{pod("p", "pod-uid", corev1.PodRunning, "claim")}}, true, "used by pod default/p, which runs"},
		"its pod is gone":                            {Reading{Claim: object("uid")}, false, gone},
		"both are gone":                              {Reading{}, false, gone},
		"only other pods are there":                  {Reading{Pods: []corev1.Pod{pod("q", "q-uid", corev1.PodRunning, "other"), pod("r", "r-uid", corev1.PodRunning, "")}}, false, gone},
		"another claim of its name has a pod":        {Reading{Claim: object("next"), Pods: []corev1.Pod{pod("q", "q-uid", corev1.PodPending, "claim")}}, false, gone},
		"its pod is deleted":                         {Reading{Claim: object("uid"), Pods: []corev1.Pod{terminating}}, false, "which is being released: pod default/p was deleted at 2026-11-22T12:00:00Z, and has not ended yet"},
		"its pod is deleted, and another runs":       {Reading{Claim: object("uid"), Pods: []corev1.Pod{terminating, pod("q", "q-uid", corev1.PodRunning, "claim")}}, true, "used by pod default/q, which runs"},
		"another runs, and its pod is deleted":       {Reading{Claim: object("uid"), Pods: []corev1.Pod{pod("q", "q-uid", corev1.PodRunning, "claim"), terminating}}, true, "used by pod default/q, which runs"},
		"its pod is deleted, without a grace period": {Reading{Claim: object("uid"), Pods: []corev1.Pod{graceless}}, false, "which is being released: pod default/p was deleted at 2026-11-22T12:00:30Z, and has not ended yet"},
		"its pod has ended":                          {Reading{Claim: object("uid"), Pods: []corev1.Pod{pod("p", "pod-uid", corev1.PodFailed, "")}}, false, "which is being released: pod default/p has ended, and the kubelet has not unprepared it yet"},
		"the claim is not told":                      {Reading{ClaimErr: errors.New("away")}, false, "and the API server does not tell who uses it: away"},
		"the pods are not told":                      {Reading{Claim: object("uid"), PodsErr: errors.New("away")}, false, "and the API server does not tell who uses it: away"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			public := strings.NewReplacer("pod default/p", "its pod", "pod default/q", "its pod", ": away", "").Replace(tc.want)
			want := Use{Ends: !tc.runs, Text: tc.want, Public: public}
			if diff := cmp.Diff(want, UseOf(held, &tc.reading)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
