// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podmemory

import (
	"context"
	"errors"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/features"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/defaultbinder"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/queuesort"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	"k8s.io/kubernetes/pkg/scheduler/metrics"
	"k8s.io/utils/ptr"
)

// How the framework tells: a pod that is bound just now, or was refused by PreBind, has not been preempted.
func TestWhetherAPodIsPreemptedIsToldByTheContextOfPreBind(t *testing.T) {
	metrics.Register()
	for name, tc := range map[string]struct {
		status    *fwk.Status
		preempted bool
	}{
		"PreBind has passed":                    {},
		"PreBind has failed":                    {status: fwk.AsStatus(errors.New("unreachable"))},
		"PreBind was cancelled, and has failed": {status: fwk.AsStatus(errors.New("unreachable")), preempted: true},
		"PreBind was cancelled, and has passed": {preempted: true},
	} {
		t.Run(name, func(t *testing.T) {
			binding, cancel := context.WithCancelCause(t.Context())
			attempt := &Attempt{}
			plugin := &preBinder{func(ctx context.Context) *fwk.Status {
				attempt.binding.Store(&ctx)
				if attempt.IsCancelled(true) {
					t.Error("cancelled at the beginning")
				}
				if tc.preempted {
					cancel(errors.New("preempted"))
				}
				return tc.status
			}}
			own := func(context.Context, runtime.Object, fwk.Handle) (fwk.Plugin, error) { return plugin, nil }
			profile := &schedulerconfig.KubeSchedulerProfile{Plugins: &schedulerconfig.Plugins{}}
			for _, name := range []string{queuesort.Name, plugin.Name(), defaultbinder.Name} {
				profile.Plugins.MultiPoint.Enabled = append(profile.Plugins.MultiPoint.Enabled, schedulerconfig.Plugin{Name: name})
			}
			handle, err := frameworkruntime.NewFramework(t.Context(), frameworkruntime.Registry{
				queuesort.Name: queuesort.New, plugin.Name(): own, defaultbinder.Name: defaultbinder.New,
			}, profile)
			if err != nil {
				t.Fatal(err)
			}
			handle.RunPreBindPlugins(binding, framework.NewCycleState(), &v1.Pod{}, "node-a")
			if got := attempt.IsCancelled(true); got != tc.preempted {
				t.Errorf("cancelled: %t, cause %v", got, context.Cause(*attempt.binding.Load()))
			}
			cancel(nil) // as the end of the binding does
			if got := attempt.IsCancelled(true); got != tc.preempted {
				t.Errorf("cancelled when the binding has ended: %t, cause %v", got, context.Cause(*attempt.binding.Load()))
			}
		})
	}
}

// preBinder is a plugin that does something in PreBind.
type preBinder struct {
	do func(context.Context) *fwk.Status
}

func (p *preBinder) Name() string { return "PreBinder" }

func (p *preBinder) PreBindPreFlight(context.Context, fwk.CycleState, *v1.Pod, string) (*fwk.PreBindPreFlightResult, *fwk.Status) {
	return nil, nil
}

func (p *preBinder) PreBind(ctx context.Context, _ fwk.CycleState, _ *v1.Pod, _ string) *fwk.Status {
	return p.do(ctx)
}

// Of a pod of a group that is bound in the end nothing is kept, whatever came before, and nothing of one that is gone.
func TestNothingIsKeptOfAPodThatIsBoundOrGone(t *testing.T) {
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.GenericWorkload, true)
	for name, end := range map[string]func(*Attempts, *v1.Pod){
		"bound": func(a *Attempts, p *v1.Pod) { a.End(p.UID) },
		"gone":  func(a *Attempts, p *v1.Pod) { a.Fail(p); a.Forget(p) },
	} {
		t.Run(name, func(t *testing.T) {
			a := newAttempts()
			p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "p", UID: "p-uid"}}
			p.Spec.SchedulingGroup = &v1.PodSchedulingGroup{PodGroupName: ptr.To("g")}
			for range 2 {
				a.Begin(nil, p)
				a.Refuse(p, time.Unix(1, 0))
				a.Fail(p)
			}
			a.Begin(nil, p)
			a.PreBind(t.Context(), p.UID)
			a.GiveWay(p)
			if a.Fail(p) == 0 {
				t.Error("a pod whose binding has failed makes no pause")
			}
			if len(a.gaveWay) == 0 || len(a.failed) == 0 || len(a.refused) == 0 {
				t.Errorf("not noted: %v, %v, %v", a.gaveWay, a.failed, a.refused)
			}
			a.Begin(nil, p)
			end(a, p)
			if n := len(a.byPod) + len(a.gaveWay) + len(a.failed) + len(a.refused); n > 0 {
				t.Errorf("%d notes are kept: %v, %v, %v, %v", n, a.byPod, a.gaveWay, a.failed, a.refused)
			}
		})
	}
}
