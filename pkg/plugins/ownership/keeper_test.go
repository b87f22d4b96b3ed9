// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package ownership

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/plugins/config"
)

const profile = "stowage"

func args(change ...func(*config.OwnershipArgs)) *config.OwnershipArgs {
	defaults := &config.DeviceClaimsArgs{Ownership: &config.OwnershipArgs{Enabled: ptr.To(true)}}
	config.SetDefaultsDeviceClaimsArgs(defaults)
	for _, c := range change {
		c(defaults.Ownership)
	}
	return defaults.Ownership
}

func TestRule(t *testing.T) {
	got, err := Rule(profile, args())
	if err != nil {
		t.Fatal(err)
	}
	want := &resourceapi.DeviceTaintRule{
		ObjectMeta: metav1.ObjectMeta{Name: "stowage-owned-by-stowage", Labels: map[string]string{"stowage.dev/owned-by": "stowage"}},
		Spec: resourceapi.DeviceTaintRuleSpec{
			DeviceSelector: &resourceapi.DeviceTaintSelector{Driver: ptr.To("gpu.nvidia.com")},
			Taint:          resourceapi.DeviceTaint{Key: "stowage.dev/owned", Effect: resourceapi.DeviceTaintEffectNoSchedule},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("rule with defaults (-want +got):\n%s", diff)
	}
	got, err = Rule(profile, args(func(a *config.OwnershipArgs) { a.Pool, a.Device = "node-1", "gpu-0" }))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&resourceapi.DeviceTaintSelector{Driver: ptr.To("gpu.nvidia.com"), Pool: ptr.To("node-1"), Device: ptr.To("gpu-0")}, got.Spec.DeviceSelector); diff != "" {
		t.Errorf("selector (-want +got):\n%s", diff)
	}
	if got, err := Rule("any Name", args(func(a *config.OwnershipArgs) { a.Enabled = ptr.To(false) })); got != nil || err != nil {
		t.Errorf("disabled: rule %v, error %v", got, err)
	}
	if _, err := Rule("any Name", args()); err == nil || !strings.Contains(err.Error(), `"any Name"`) {
		t.Errorf("a profile that no rule can be named after gives %v", err)
	}
}

// world is a keeper with an API server.
type world struct {
	t      *testing.T
	ctx    context.Context
	client *fake.Clientset
	keeper *Keeper
	name   string
}

// start runs a keeper that wants, or does not want, the rule of the profile.
func start(t *testing.T, want bool, client *fake.Clientset) *world {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	factory := informers.NewSharedInformerFactory(client, 0)
	w := &world{t: t, ctx: ctx, client: client}
	w.keeper = NewKeeper(t.Context(), client.ResourceV1(), factory.Resource().V1().DeviceTaintRules())
	w.keeper.limiter = flowcontrol.NewFakeAlwaysRateLimiter()
	w.name, _ = RuleName(profile)
	w.keeper.Want(w.name, w.rule(want))
	factory.Start(ctx.Done())
	var running sync.WaitGroup
	running.Go(func() { w.keeper.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
		factory.Shutdown()
	})
	return w
}

func (w *world) rule(enabled bool) *resourceapi.DeviceTaintRule {
	w.t.Helper()
	rule, err := Rule(profile, args(func(a *config.OwnershipArgs) { a.Enabled = &enabled }))
	if err != nil {
		w.t.Fatal(err)
	}
	return rule
}

// get returns the rule, nil if there is none.
func (w *world) get() *resourceapi.DeviceTaintRule {
	rule, err := w.client.ResourceV1().DeviceTaintRules().Get(w.ctx, w.name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return rule
}

func (w *world) eventually(what string, met func() bool) {
	w.t.Helper()
	err := wait.PollUntilContextTimeout(w.ctx, time.Millisecond, 20*time.Second, true, func(context.Context) (bool, error) { return met(), nil })
	if err != nil {
		w.t.Fatalf("waiting until %s: %v; the rule is %+v", what, err, w.get())
	}
}

// asWanted tells whether the rule is there and what it should be.
func (w *world) asWanted() bool {
	have := w.get()
	return have != nil && repaired(have, w.rule(true)) == nil
}

func TestKeeperCreatesKeepsAndRemoves(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	t.Run("while it runs", func(t *testing.T) { // its clean-up comes before the check for goroutines
		w := start(t, true, fake.NewSimpleClientset())
		w.eventually("the rule is made", w.asWanted)

		rules := w.client.ResourceV1().DeviceTaintRules()
		if err := rules.Delete(w.ctx, w.name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.eventually("the deleted rule is back", w.asWanted)

		for what, change := range map[string]func(*resourceapi.DeviceTaintRule){
			"effect":   func(r *resourceapi.DeviceTaintRule) { r.Spec.Taint.Effect = resourceapi.DeviceTaintEffectNone },
			"key":      func(r *resourceapi.DeviceTaintRule) { r.Spec.Taint.Key = "example.com/other" },
			"value":    func(r *resourceapi.DeviceTaintRule) { r.Spec.Taint.Value = "x" },
			"selector": func(r *resourceapi.DeviceTaintRule) { r.Spec.DeviceSelector.Pool = ptr.To("node-1") },
			"label":    func(r *resourceapi.DeviceTaintRule) { r.Labels = nil },
		} {
			changed := w.get()
			change(changed)
			if _, err := rules.Update(w.ctx, changed, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			w.eventually("the rule's "+what+" is repaired", w.asWanted)
		}

		w.keeper.Want(w.name, nil)
		w.eventually("the rule is removed", func() bool { return w.get() == nil })
	})
}

func TestKeeperLeavesWhatIsNotOurs(t *testing.T) {
	foreign := &resourceapi.DeviceTaintRule{
		ObjectMeta: metav1.ObjectMeta{Name: "stowage-owned-by-stowage"},
		Spec:       resourceapi.DeviceTaintRuleSpec{Taint: resourceapi.DeviceTaint{Key: "example.com/lost", Effect: resourceapi.DeviceTaintEffectNoExecute}},
	}
	other := &resourceapi.DeviceTaintRule{
		ObjectMeta: metav1.ObjectMeta{Name: "stowage-owned-by-another", Labels: map[string]string{Label: "another"}},
		Spec:       resourceapi.DeviceTaintRuleSpec{Taint: resourceapi.DeviceTaint{Key: TaintKey, Effect: resourceapi.DeviceTaintEffectNoSchedule}},
	}
	for name, wanted := range map[string]bool{"when ownership is on": true, "when ownership is off": false} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewSimpleClientset(foreign.DeepCopy(), other.DeepCopy())
			w := start(t, wanted, client)
			// A rule that the keeper does remove or make shows that it has looked at the others by then.
			mark := "stowage-owned-by-mark"
			w.keeper.Want(mark, func() *resourceapi.DeviceTaintRule {
				rule := w.rule(true)
				rule.Name = mark
				return rule
			}())
			rules := client.ResourceV1().DeviceTaintRules()
			w.eventually("the keeper has worked", func() bool {
				_, err := rules.Get(w.ctx, mark, metav1.GetOptions{})
				return err == nil
			})
			for _, want := range []*resourceapi.DeviceTaintRule{foreign, other} {
				got, err := rules.Get(w.ctx, want.Name, metav1.GetOptions{})
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(metav1.ObjectMeta{}, "ResourceVersion", "ManagedFields"), cmpopts.IgnoreTypes(metav1.TypeMeta{})); diff != "" {
					t.Errorf("%s was changed (-want +got):\n%s", want.Name, diff)
				}
			}
		})
	}
}

func TestKeeperTriesAgain(t *testing.T) {
	client := fake.NewSimpleClientset()
	var mu sync.Mutex
	failures := 3
	client.PrependReactor("create", "devicetaintrules", func(clienttesting.Action) (bool, runtime.Object, error) {
		mu.Lock()
		defer mu.Unlock()
		if failures == 0 {
			return false, nil, nil
		}
		failures--
		return true, nil, errors.New("no")
	})
	w := start(t, true, client)
	w.eventually("the rule is made", w.asWanted)
	mu.Lock()
	defer mu.Unlock()
	if failures > 0 {
		t.Errorf("%d failures were not met", failures)
	}
}
