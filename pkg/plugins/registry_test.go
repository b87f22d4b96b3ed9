// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package plugins_test

import (
	"context"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2/ktesting"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	"stowage.dev/stowage/pkg/plugins"
)

func TestASchedulerWithoutDeviceClaimsRuns(t *testing.T) {
	logger, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	client, set := fake.NewSimpleClientset(), plugins.NewSet()
	sched, err := scheduler.New(ctx, client, informers.NewSharedInformerFactory(client, 0), nil,
		func(string) events.EventRecorderLogger { return events.NewFakeRecorder(8) },
		scheduler.WithFrameworkOutOfTreeRegistry(set.Registry()))
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		sched.SchedulingQueue.Close()
		cancel()
		if err := sched.Profiles.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := set.Adopt(sched); err != nil {
		t.Fatal(err)
	}

	sched.SchedulingQueue.Run(logger) // it leads
	pod, err := framework.NewPodInfo(&v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", UID: "p"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, profile := range sched.Profiles {
		sched.FailureHandler(ctx, profile, &framework.QueuedPodInfo{PodInfo: pod}, fwk.NewStatus(fwk.Unschedulable, "no node"), nil, time.Now())
	}
}
