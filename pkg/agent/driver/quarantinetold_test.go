// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestTheAPIServerKnowsOfAQuarantineBeforeTheKubeletDoes: once the claim is gone the scheduler gives its GPU to the next pod, which would be
// bound to the GPU, and stay there.
func TestTheAPIServerKnowsOfAQuarantineBeforeTheKubeletDoes(t *testing.T) {
	registerMetrics()
	const gpu = "gpu-0000-00-1b-0"
	for name, tc := range map[string]struct {
		happens nvmlsim.Command
		away    bool
		want    []string // the keys of the taints that the API server has, the last part
		within  time.Duration
	}{
		"all is well":              {within: time.Second},
		"the GPU is lost":          {happens: &nvmlsim.LoseGPU{GPU: "0"}, want: []string{"occupied"}, within: time.Minute},
		"the API server is away":   {happens: &nvmlsim.LoseGPU{GPU: "0"}, away: true, within: prepare.DefaultUndoTimeout + tellTimeout},
		"away, and nothing to say": {away: true, within: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, ctx := ktesting.NewTestContext(t)
				claim := allocatedClaim("train", gpu)
				r, api := newRig(t, "t4"), namingServer(claim)
				agent := r.agent(ctx, api)
				defer background(ctx, agent.watch)()
				defer background(ctx, agent.publisher.run)()
				time.Sleep(10 * time.Second)
				p := agent.newPlugin(func(error) {})
				if results, err := p.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{claim}); err != nil || results["train-uid"].Err != nil {
					t.Fatalf("prepare: %v, %v", results, err)
				}
				time.Sleep(time.Second) // between two looks at the ledger
				api.away.Store(tc.away)
				if tc.happens != nil {
					r.do(tc.happens)
				}
				begin := time.Now()
				results, err := p.UnprepareResourceClaims(ctx, []kubeletplugin.NamespacedObject{{UID: "train-uid"}})
				if err != nil || results["train-uid"] != nil {
					t.Fatalf("unprepare: %v, %v", results, err)
				}
				took := time.Since(begin)
				api.away.Store(false)
				list, err := api.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
				if err != nil {
					t.Fatal(err)
				}
				var got []string
				for _, slice := range list.Items {
					for _, device := range slice.Spec.Devices {
						for _, taint := range device.Taints {
							if device.Name == gpu {
								got = append(got, strings.TrimPrefix(taint.Key, Name+"/"))
							}
						}
					}
				}
				if strings.Join(got, " ") != strings.Join(tc.want, " ") || took > tc.within {
					t.Errorf("when the kubelet was answered, after %s: taints %v; want %v, after at most %s", took, got, tc.want, tc.within)
				}
			})
		})
	}
}
