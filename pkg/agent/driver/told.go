// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
)

const (
	// tellTimeout is how long the kubelet waits for its answer until the API server has the taints of the GPUs that it is about. The
	// rest of its patience is for locks and for what is undone.
	tellTimeout = 3 * time.Second
	tellPoll    = 100 * time.Millisecond
)

// told returns when the API server has the taints that the GPUs are to have, whichever agent of the node writes them; after tellTimeout at
// the latest. It is asked itself, because what a watch brings may be old.
func (p *publisher) told(ctx context.Context, gpus []string) {
	want := p.taintsOf(gpus)
	if len(want) == 0 {
		return
	}
	begun := time.Now()
	ctx, cancel := context.WithTimeout(ctx, tellTimeout)
	defer cancel()
	missing := context.Cause(ctx)
	if wait.PollUntilContextCancel(ctx, tellPoll, true, func(ctx context.Context) (bool, error) {
		missing = p.missing(ctx, want)
		return missing == nil, nil
	}) != nil {
		klog.FromContext(ctx).Info("The kubelet is answered although the API server does not have all taints of its GPUs yet",
			"waited", time.Since(begun).Round(time.Millisecond), "reason", fmt.Sprint(missing))
	}
}

// taintsOf are the taints that devices of these GPUs are to have, by device. Devices without are left out.
func (p *publisher) taintsOf(gpus []string) map[string][]resourceapi.DeviceTaint {
	wanted := p.wanted()
	if wanted == nil || len(gpus) == 0 {
		return nil
	}
	list := map[string][]resourceapi.DeviceTaint{}
	for _, slice := range wanted.Pools[p.nodeName].Slices {
		for _, device := range slice.Devices {
			ofOne := slices.ContainsFunc(gpus, func(gpu string) bool { return device.Name == gpu || strings.HasPrefix(device.Name, gpu+"-") })
			if ofOne && len(device.Taints) > 0 {
				list[device.Name] = device.Taints
			}
		}
	}
	return list
}

// missing says which of the taints the API server does not have.
func (p *publisher) missing(ctx context.Context, want map[string][]resourceapi.DeviceTaint) error {
	list, err := p.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: slicesOf(p.nodeName)})
	if err != nil {
		return fmt.Errorf("list ResourceSlices: %w", err)
	}
	has := map[string][]resourceapi.DeviceTaint{}
	for _, slice := range list.Items {
		for _, device := range slice.Spec.Devices {
			has[device.Name] = device.Taints
		}
	}
	var errs []error
	for device, taints := range want {
		for i := range taints {
			if !slices.ContainsFunc(has[device], func(t resourceapi.DeviceTaint) bool { return sameTaint(&t, &taints[i]) }) {
				errs = append(errs, fmt.Errorf("device %s: taint %s", device, taints[i].Key))
			}
		}
	}
	return errors.Join(errs...)
}
