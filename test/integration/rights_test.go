// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/util/yaml"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/kubernetes/cmd/kube-scheduler/app/options"
	"k8s.io/kubernetes/pkg/features"
	"k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/profile"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/internal/localcluster"
	"stowage.dev/stowage/pkg/plugins/rights"
)

// schedulerRules are the rules of the scheduler's ClusterRole.
func schedulerRules(t *testing.T) []rbacv1.PolicyRule {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(manifests, "base/access/scheduler.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096)
	for {
		var role rbacv1.ClusterRole
		if err := decoder.Decode(&role); errors.Is(err, io.EOF) {
			t.Fatal("the manifest has no ClusterRole")
		} else if err != nil {
			t.Fatal(err)
		}
		if role.Kind == "ClusterRole" {
			return role.Rules
		}
	}
}

// withoutRight takes one verb on one resource out of rules.
func withoutRight(rules []rbacv1.PolicyRule, group, resource, verb string) []rbacv1.PolicyRule {
	var out []rbacv1.PolicyRule
	for _, rule := range rules {
		for _, r := range rule.Resources {
			for _, v := range rule.Verbs {
				if rule.APIGroups[0] != group || r != resource || v != verb {
					out = append(out, rbacv1.PolicyRule{APIGroups: rule.APIGroups, Resources: []string{r}, Verbs: []string{v}})
				}
			}
		}
	}
	return out
}

// account is a ServiceAccount with a ClusterRole of its own.
type account struct {
	*world
	role *rbacv1.ClusterRole
}

func (w *world) newAccount(name string, rules []rbacv1.PolicyRule) *account {
	w.t.Helper()
	admin := cluster.AdminClient()
	_, err := admin.CoreV1().ServiceAccounts(w.name).Create(w.ctx, &v1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	w.must(err, "making the ServiceAccount")
	return w.bind(w.name, name, w.name+"-"+name, rules)
}

// bind gives an account the rights, as those of a ClusterRole of that name. They go with the test.
func (w *world) bind(namespace, name, full string, rules []rbacv1.PolicyRule) *account {
	w.t.Helper()
	admin := cluster.AdminClient()
	role, err := admin.RbacV1().ClusterRoles().Create(w.ctx, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: full}, Rules: rules}, metav1.CreateOptions{})
	w.must(err, "making the ClusterRole")
	_, err = admin.RbacV1().ClusterRoleBindings().Create(w.ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: full},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: full},
		Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: namespace, Name: name}},
	}, metav1.CreateOptions{})
	w.must(err, "making the ClusterRoleBinding")
	w.t.Cleanup(func() {
		ctx := context.WithoutCancel(w.ctx)
		if err := errors.Join(admin.RbacV1().ClusterRoleBindings().Delete(ctx, full, metav1.DeleteOptions{}),
			admin.RbacV1().ClusterRoles().Delete(ctx, full, metav1.DeleteOptions{})); err != nil {
			w.t.Error(err)
		}
	})
	return &account{w, role}
}

func (a *account) grant(rules []rbacv1.PolicyRule) {
	a.t.Helper()
	a.role.Rules = rules
	var err error
	a.role, err = cluster.AdminClient().RbacV1().ClusterRoles().Update(a.ctx, a.role, metav1.UpdateOptions{})
	a.must(err, "changing the ClusterRole")
}

// Of each verb in the manifest's ClusterRole the checker says when it is missing, and no more when it is granted.
func TestEachMissingRightIsNamed(t *testing.T) {
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.GenericWorkload, true)
	w := newWorld(t)
	rules := schedulerRules(t)
	required := requiredOfSecondScheduler(t)
	a := w.newAccount("less", rules)
	config, err := cluster.ServiceAccountConfig(w.ctx, w.name, "less", nil)
	w.must(err, "getting the identity")
	config.QPS, config.Burst = -1, 0
	checker := rights.NewChecker(kubernetes.NewForConfigOrDie(config), required, nil, clock.RealClock{}, nil)
	await := func(what, want string) {
		t.Helper()
		err := wait.PollUntilContextTimeout(w.ctx, 20*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
			checker.Look(ctx)
			return problem(t, checker) == want, nil
		})
		if err != nil {
			t.Fatalf("%s: %v; problem\n%s\nwant\n%s", what, err, problem(t, checker), want)
		}
	}
	await("with all rights", "")
	checked := 0
	for _, rule := range rules {
		for _, resource := range rule.Resources {
			for _, verb := range rule.Verbs {
				a.grant(withoutRight(rules, rule.APIGroups[0], resource, verb))
				name := verb + " " + resource + " in all namespaces"
				if group := rule.APIGroups[0]; group != "" {
					base, sub, _ := strings.Cut(resource, "/")
					name = strings.TrimSuffix(verb+" "+base+"."+group+"/"+sub, "/") + " in all namespaces"
				}
				if resource == "events" { // pods are scheduled without
					err := wait.PollUntilContextTimeout(w.ctx, 20*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
						checker.Look(ctx)
						return slices.Equal(checker.Missing(), []string{name}), nil
					})
					if err != nil || problem(t, checker) != "" {
						t.Fatalf("%s: %v; missing %v, problem %q", name, err, checker.Missing(), problem(t, checker))
					}
					checked++
					continue
				}
				await(name, fmt.Sprintf(`The scheduler lacks rights in the cluster. It is user "system:serviceaccount:%s:less" and may not:
  %s
To grant them, apply:
  ClusterRole stowage-scheduler: kubectl apply -k manifests/base/access
Rights are looked at every 10s until nothing is wrong.
`, w.name, name))
				checked++
			}
		}
	}
	if checked != len(required) {
		t.Errorf("%d rights of the manifest, %d are required", checked, len(required))
	}
	a.grant(rules)
	await("after the grant", "")
}

// The scheduler itself says so in /readyz to those who may know, and which policies are not about its account. It becomes ready when the right is
// granted and the policy is about its account.
func TestReadyzSaysWhichRightIsMissing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	rules := append(schedulerRules(t), // and what system:auth-delegator grants
		rbacv1.PolicyRule{APIGroups: []string{"authentication.k8s.io"}, Resources: []string{"tokenreviews"}, Verbs: []string{"create"}},
		rbacv1.PolicyRule{APIGroups: []string{"authorization.k8s.io"}, Resources: []string{"subjectaccessreviews"}, Verbs: []string{"create"}})
	a := w.newAccount("scheduler", withoutRight(rules, "resource.k8s.io", "resourceslices", "list"))
	w.newAccount("stranger", nil)
	w.newAccount("operator", []rbacv1.PolicyRule{{NonResourceURLs: []string{"/readyz/*"}, Verbs: []string{"get"}}})
	token := func(name string) string {
		config, err := cluster.ServiceAccountConfig(w.ctx, w.name, name, nil)
		w.must(err, "getting the identity")
		return config.BearerToken
	}
	kubeconfig, err := cluster.ServiceAccountKubeconfig(w.ctx, w.name, "scheduler", nil)
	w.must(err, "getting the identity")
	text, err := os.ReadFile(secondScheduler)
	w.must(err, "reading the configuration")
	config := strings.NewReplacer("clientConnection:\n", "clientConnection:\n  kubeconfig: "+kubeconfig+"\n",
		"leaderElect: true", "leaderElect: false", "schedulerName: stowage\n", "schedulerName: "+w.name+"\n").Replace(string(text))
	port, err := localcluster.FreePort()
	w.must(err, "reserving a port")
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	get := func(ctx context.Context, token, path string) (int, string, error) {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("https://127.0.0.1:%d%s", port, path), nil)
		if err != nil {
			return 0, "", err
		}
		if token != "" {
			request.Header.Set("Authorization", "Bearer "+token)
		}
		answer, err := client.Do(request)
		if err != nil {
			return 0, "", err
		}
		defer answer.Body.Close()
		body, err := io.ReadAll(answer.Body)
		return answer.StatusCode, string(body), err
	}
	binary, err := schedulerBinary()
	w.must(err, "building")
	process, err := localcluster.StartProcess(w.ctx, localcluster.Command{
		Name: w.name + "-scheduler", Path: binary, LogFile: filepath.Join(cluster.LogDir(), w.name+"-scheduler.log"),
		Args: []string{
			"--config=" + writeConfig(t, config), "--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", port),
			"--authentication-kubeconfig=" + kubeconfig, "--authorization-kubeconfig=" + kubeconfig, "--authentication-skip-lookup",
		},
		Ready: func(ctx context.Context) error {
			if status, body, err := get(ctx, "", "/livez"); err != nil || status != http.StatusOK {
				return fmt.Errorf("%d %s %w", status, body, err)
			}
			return nil
		},
	})
	w.must(err, "starting the scheduler")
	stopAtEnd(t, &localcluster.Scheduler{Process: process})
	await := func(token string, wantStatus int, want string) {
		t.Helper()
		var status int
		var body string
		err := wait.PollUntilContextTimeout(w.ctx, 100*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
			status, body, _ = get(ctx, token, "/readyz")
			return status == wantStatus && strings.Contains(body, want), nil
		})
		if err != nil {
			t.Fatalf("/readyz is %d %s, want %d %s", status, body, wantStatus, want)
		}
	}
	await(token("operator"), http.StatusInternalServerError,
		"\n  list resourceslices.resource.k8s.io in all namespaces\nTo grant them, apply:\n  ClusterRole stowage-scheduler: ")
	for _, who := range []string{"", token("stranger")} {
		const want = "Internal Server Error: \"/readyz\": [-]rights failed: reason withheld\n"
		if status, body, err := get(w.ctx, who, "/readyz"); err != nil || status != http.StatusInternalServerError || body != want {
			t.Errorf("others get %d %q %v, want %q", status, body, err, want)
		}
	}
	a.grant(rules)
	await(token("operator"), http.StatusInternalServerError, fmt.Sprintf(`[-]rights failed: Admission policies are missing or not about the scheduler's account "system:serviceaccount:%s:scheduler", which could write:
  claims of users (policy stowage-scheduler-own-claims)
`, w.name))
	w.coverByPolicy("stowage-scheduler-own-claims", "system:serviceaccount:"+w.name+":scheduler")
	await("", http.StatusOK, "ok")
	page := func(token string) map[string]int {
		statuses := map[string]int{}
		for _, path := range []string{"/livez", "/healthz", "/readyz", "/readyz/shutdown", "/metrics", "/configz", "/debug/pprof/cmdline"} {
			statuses[path], _, err = get(w.ctx, token, path)
			w.must(err, "getting "+path)
		}
		return statuses
	}
	const ok, no = http.StatusOK, http.StatusForbidden
	if diff := cmp.Diff(map[string]int{
		"/livez": ok, "/healthz": ok, "/readyz": ok, "/readyz/shutdown": no, "/metrics": no, "/configz": no, "/debug/pprof/cmdline": no,
	}, page("")); diff != "" {
		t.Errorf("anonymous callers (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]int{
		"/livez": ok, "/healthz": ok, "/readyz": ok, "/readyz/shutdown": ok, "/metrics": no, "/configz": no, "/debug/pprof/cmdline": no,
	}, page(token("operator"))); diff != "" {
		t.Errorf("callers who may see readiness (-want +got):\n%s", diff)
	}
}

// coverByPolicy has a policy be about a further account until the test ends.
func (w *world) coverByPolicy(name, account string) {
	w.t.Helper()
	client := cluster.AdminClient().AdmissionregistrationV1().ValidatingAdmissionPolicies()
	change := func(ctx context.Context, change func(expression string) string) error {
		return retry.RetryOnConflict(retry.DefaultRetry, func() error {
			policy, err := client.Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			condition := &policy.Spec.MatchConditions[0]
			condition.Expression = change(condition.Expression)
			_, err = client.Update(ctx, policy, metav1.UpdateOptions{})
			return err
		})
	}
	further := fmt.Sprintf(" || request.userInfo.username == %q", account)
	w.must(change(w.ctx, func(expression string) string { return expression + further }), "changing the policy")
	w.t.Cleanup(func() {
		err := change(context.WithoutCancel(w.ctx), func(expression string) string { return strings.Replace(expression, further, "", 1) })
		if err != nil {
			w.t.Error(err)
		}
	})
}

// requiredOfSecondScheduler are the rights that the manifests' own configuration needs, without its lease.
func requiredOfSecondScheduler(t *testing.T) []rights.Right {
	t.Helper()
	logger, _ := ktesting.NewTestContext(t)
	cfg, err := options.LoadConfigFromFile(logger, secondScheduler)
	if err != nil {
		t.Fatal(err)
	}
	cfg.LeaderElection.LeaderElect = false
	return rights.Required(cfg, profile.Map{"stowage": listed{plugins: cfg.Profiles[0].Plugins}})
}

// listed is a profile that is not run.
type listed struct {
	framework.Framework
	plugins *config.Plugins
}

func (l listed) ListPlugins() *config.Plugins { return l.plugins }

// problem returns what the checker says. It waits for the first look.
func problem(t *testing.T, checker *rights.Checker) string {
	t.Helper()
	text, err := checker.Problem(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return text
}
