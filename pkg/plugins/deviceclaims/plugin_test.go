// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/kubernetes/pkg/features"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/plugins/config"
)

// newPlugin makes a plugin for a scheduler of its own, that ends with the test.
func newPlugin(t *testing.T, args runtime.Object, shared *Shared) (*Plugin, error) {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	client := fake.NewSimpleClientset()
	handle, err := frameworkruntime.NewFramework(ctx, nil, nil,
		frameworkruntime.WithClientSet(client),
		frameworkruntime.WithInformerFactory(informers.NewSharedInformerFactory(client, 0)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		frameworkruntime.WaitForShutdown(handle)
		shared.stop()
	})
	return New(ctx, args, handle, shared)
}

func TestNewRefusesTheWrongArgs(t *testing.T) {
	_, err := newPlugin(t, &schedulerconfig.DynamicResourcesArgs{}, NewShared(Limits{}))
	if err == nil || !strings.Contains(err.Error(), "DynamicResourcesArgs") {
		t.Errorf("error %v", err)
	}
}

func TestNewRefusesResourcesOfNodes(t *testing.T) {
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.DRANodeAllocatableResources, true)
	_, err := newPlugin(t, nil, NewShared(Limits{}))
	if err == nil || !strings.Contains(err.Error(), "DRANodeAllocatableResources") {
		t.Errorf("error %v", err)
	}
}

func TestSharedBelongsToOneScheduler(t *testing.T) {
	shared := NewShared(Limits{})
	if _, err := newPlugin(t, nil, shared); err != nil {
		t.Fatal(err)
	}
	if _, err := newPlugin(t, nil, shared); err == nil || !strings.Contains(err.Error(), "another scheduler") {
		t.Errorf("error %v", err)
	}
	if _, err := newPlugin(t, nil, NewShared(Limits{})); err != nil {
		t.Errorf("a second scheduler with a Shared of its own: %v", err)
	}
}

func TestNewRefusesOwnershipThatCannotBeKept(t *testing.T) {
	on := &config.DeviceClaimsArgs{Ownership: &config.OwnershipArgs{Enabled: ptr.To(true)}}
	t.Run("no rule can be named after the profile", func(t *testing.T) {
		_, err := newPlugin(t, on, NewShared(Limits{}))
		if err == nil || !strings.Contains(err.Error(), `profile ""`) {
			t.Errorf("error %v", err)
		}
	})
	t.Run("taint rules are off", func(t *testing.T) {
		if err := (&Shared{}).own("stowage", on.Ownership); err == nil || !strings.Contains(err.Error(), "DRADeviceTaintRules") {
			t.Errorf("error %v", err)
		}
		off := &config.OwnershipArgs{Enabled: ptr.To(false)}
		if err := (&Shared{}).own("stowage", off); err != nil {
			t.Errorf("without ownership: %v", err)
		}
	})
}
