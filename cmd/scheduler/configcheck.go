// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/cmd/kube-scheduler/app/options"
	"k8s.io/kubernetes/pkg/scheduler"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/apis/config/validation"
	"k8s.io/kubernetes/pkg/scheduler/profile"
	"sigs.k8s.io/yaml"

	"stowage.dev/stowage/pkg/plugins"
	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims"
)

// checkConfig returns all that is wrong with a configuration file: what would keep a scheduler with these options from
// starting, and what it would warn of. It reads the file, fills in defaults and makes the plugins as the start does, with
// a client that reaches nobody. The error is one of reading the file.
func checkConfig(ctx context.Context, opts *options.Options, file string) ([]plugins.Finding, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	if finding := notYAML(data); finding != nil {
		return []plugins.Finding{*finding}, nil
	}
	further := furtherDocuments(data)
	data, findings := readable(data)
	findings = append(findings, further...)
	cfg, err := decode(data)
	if err != nil {
		return append(findings, undecodable(err)...), nil
	}
	opts.ApplyLeaderElectionTo(cfg)
	if err := validation.ValidateKubeSchedulerConfiguration(cfg); err != nil {
		findings = append(findings, invalid(cfg, err)...)
	}
	findings = append(findings, checkArgs(cfg)...)
	return append(findings, checkProfiles(klog.NewContext(ctx, klog.New(nil)), cfg, len(findings) > 0)...), nil
}

// notYAML is a finding if the file, or its first document, is no YAML object.
func notYAML(data []byte) *plugins.Finding {
	var first map[string]any
	err := yaml.Unmarshal(data, &first)
	if err == nil && len(first) > 0 {
		return nil
	}
	problem := "the file is empty"
	if err != nil {
		problem = "the file is no YAML object: " + strings.TrimPrefix(err.Error(), "error converting YAML to JSON: ")
	}
	return &plugins.Finding{Problem: problem, Change: changeKind}
}

// changeKind says how a configuration begins.
const changeKind = "begin it with apiVersion: kubescheduler.config.k8s.io/v1 and kind: KubeSchedulerConfiguration"

// documentBorder begins a document in a YAML file.
var documentBorder = regexp.MustCompile(`(?m)^---(\s|$)`)

// furtherDocuments warns of what kube-scheduler's decoder does not read.
func furtherDocuments(data []byte) []plugins.Finding {
	n := 0
	for _, document := range documentBorder.Split(string(data), -1) {
		var content any
		if err := yaml.Unmarshal([]byte(document), &content); err != nil || content != nil {
			n++
		}
	}
	if n <= 1 {
		return nil
	}
	return []plugins.Finding{{
		Warning: true, Problem: fmt.Sprintf("the file has %d documents, and only the first is read", n),
		Change: "put all profiles into one document, and remove the others",
	}}
}

// refused are the findings that keep the scheduler from starting.
func refused(findings []plugins.Finding) []plugins.Finding {
	return slices.DeleteFunc(slices.Clone(findings), func(f plugins.Finding) bool { return f.Warning })
}

// readable takes those arguments of DeviceClaims out of a file that their types cannot hold, so that the rest of the file
// can be judged, too. What is no YAML is left to kube-scheduler's decoder.
func readable(data []byte) ([]byte, []plugins.Finding) {
	var whole map[string]any
	if yaml.Unmarshal(data, &whole) != nil {
		return data, nil
	}
	var findings []plugins.Finding
	profiles, _ := whole["profiles"].([]any)
	for i, item := range profiles {
		profile, _ := item.(map[string]any)
		name, _ := profile["schedulerName"].(string)
		entries, _ := profile["pluginConfig"].([]any)
		for j, item := range entries {
			entry, _ := item.(map[string]any)
			args, ok := entry["args"].(map[string]any)
			if !ok || entry["name"] != deviceclaims.Name {
				continue
			}
			for _, misfit := range config.Misfits(args) { // which it takes out of them
				findings = append(findings, plugins.Finding{
					Profile: name, Plugin: deviceclaims.Name,
					Field: fmt.Sprintf("profiles[%d].pluginConfig[%d].args.%s", i, j, misfit.Path), Value: misfit.Value,
					Problem: misfit.Problem, Change: misfit.Change,
				})
			}
		}
	}
	if len(findings) == 0 {
		return data, nil // as it is, for messages about lines and keys given twice
	}
	fixed, err := yaml.Marshal(whole)
	if err != nil {
		return data, findings
	}
	return fixed, findings
}

// decode does what [options.LoadConfigFromFile] does, with a file's content.
func decode(data []byte) (*schedulerconfig.KubeSchedulerConfiguration, error) {
	file, err := os.CreateTemp("", "scheduler-config-*.yaml")
	if err != nil {
		return nil, err
	}
	defer os.Remove(file.Name())
	_, err = file.Write(data)
	if err = errors.Join(err, file.Close()); err != nil {
		return nil, err
	}
	return options.LoadConfigFromFile(klog.Background(), file.Name())
}

// undecodable makes findings of what kube-scheduler's decoder says.
func undecodable(err error) []plugins.Finding {
	if runtime.IsNotRegisteredError(err) {
		problem, _, _ := strings.Cut(err.Error(), " in scheme ") // which scheme is nobody's concern
		return []plugins.Finding{{
			Problem: "the file is no KubeSchedulerConfiguration: " + problem,
			Change:  changeKind,
		}}
	}
	strict, ok := runtime.AsStrictDecodingError(err)
	if !ok {
		return []plugins.Finding{{Problem: err.Error()}}
	}
	var findings []plugins.Finding
	for _, err := range strict.Errors() {
		findings = append(findings, plugins.Finding{Problem: err.Error()})
	}
	return findings
}

// invalid makes findings of what kube-scheduler's validation says.
func invalid(cfg *schedulerconfig.KubeSchedulerConfiguration, err utilerrors.Aggregate) []plugins.Finding {
	var findings []plugins.Finding
	for _, err := range err.Errors() {
		findings = append(findings, fieldFinding(cfg, nil, err))
	}
	slices.SortStableFunc(findings, func(a, b plugins.Finding) int { return cmp.Compare(a.Field, b.Field) })
	return findings
}

// place is where in a configuration a field is.
var place = regexp.MustCompile(`^profiles\[(\d+)\](?:\.pluginConfig\[(\d+)\])?`)

// fieldFinding makes a finding of an error about a field below a path.
func fieldFinding(cfg *schedulerconfig.KubeSchedulerConfiguration, below *field.Path, err error) plugins.Finding {
	var invalid *field.Error
	if !errors.As(err, &invalid) {
		return plugins.Finding{Problem: err.Error()}
	}
	f := plugins.Finding{Field: invalid.Field, Problem: invalid.ErrorBody()}
	if below != nil {
		f.Field = below.Child(invalid.Field).String()
	}
	if value := invalid.BadValue; value != nil && value != "" && invalid.Type != field.ErrorTypeRequired {
		f.Value = fmt.Sprint(value)
	}
	if invalid.Type == field.ErrorTypeDuplicate {
		f.Problem = fmt.Sprintf("%s has the same value as %s", f.Field, f.Value)
		f.Value = ""
	}
	if at := place.FindStringSubmatch(f.Field); at != nil {
		if i, err := strconv.Atoi(at[1]); err == nil && i < len(cfg.Profiles) {
			f.Profile = cfg.Profiles[i].SchedulerName
			if j, err := strconv.Atoi(at[2]); err == nil && j < len(cfg.Profiles[i].PluginConfig) {
				f.Plugin = cfg.Profiles[i].PluginConfig[j].Name
			}
		}
	}
	return f
}

// checkArgs judges the arguments of DeviceClaims in all profiles. Bad ones are replaced by the defaults, so that the
// plugins can be made and the rest is judged, too.
func checkArgs(cfg *schedulerconfig.KubeSchedulerConfiguration) []plugins.Finding {
	var findings []plugins.Finding
	for i := range cfg.Profiles {
		for j := range cfg.Profiles[i].PluginConfig {
			args, ok := cfg.Profiles[i].PluginConfig[j].Args.(*config.DeviceClaimsArgs)
			if !ok {
				continue
			}
			err := config.ValidateDeviceClaimsArgs(args)
			if err == nil {
				continue
			}
			at := field.NewPath("profiles").Index(i).Child("pluginConfig").Index(j).Child("args")
			var all utilerrors.Aggregate
			if !errors.As(err, &all) {
				all = utilerrors.NewAggregate([]error{err})
			}
			for _, err := range all.Errors() {
				f := fieldFinding(cfg, at, err)
				f.Change = adviceFor(err)
				findings = append(findings, f)
			}
			defaults := &config.DeviceClaimsArgs{TypeMeta: args.TypeMeta}
			config.SetDefaultsDeviceClaimsArgs(defaults)
			cfg.Profiles[i].PluginConfig[j].Args = defaults
		}
	}
	return findings
}

// adviceFor says what to change about an argument.
func adviceFor(err error) string {
	var invalid *field.Error
	if errors.As(err, &invalid) {
		for _, f := range config.Fields() {
			if f.Path == invalid.Field && f.Default != "" {
				return fmt.Sprintf("correct %s, or remove it for its default, %s", f.Path, f.Default)
			}
		}
	}
	return ""
}

// checkProfiles makes the plugins of all profiles and judges which ones there are, and their order. What keeps one profile
// from being made does not hide what is wrong with the others. explained: there are findings that may be why profiles do
// not go together.
func checkProfiles(ctx context.Context, cfg *schedulerconfig.KubeSchedulerConfiguration, explained bool) []plugins.Finding {
	profiles, stop, err := makeProfiles(ctx, cfg, cfg.Profiles)
	defer stop()
	if err == nil {
		return plugins.Check(profiles)
	}
	var findings []plugins.Finding
	made := profile.Map{}
	for _, p := range cfg.Profiles {
		alone, stop, err := makeProfiles(ctx, cfg, []schedulerconfig.KubeSchedulerProfile{p})
		defer stop()
		if err != nil {
			findings = append(findings, plugins.Finding{
				Profile: p.SchedulerName, Problem: innermost(err, p.SchedulerName),
				Change: "correct this profile; the order of its plugins is checked once it can be made",
			})
			continue
		}
		for name, framework := range alone {
			made[name] = framework
		}
	}
	if len(findings) == 0 && !explained { // each is good by itself, and they do not go together
		findings = append(findings, plugins.Finding{Problem: err.Error()})
	}
	return append(findings, plugins.Check(made)...)
}

// innermost is an error of making a profile without the profile's name, which the finding has.
func innermost(err error, name string) string {
	return strings.TrimPrefix(strings.TrimPrefix(err.Error(), "initializing profiles: "), "creating profile for scheduler name "+name+": ")
}

// makeProfiles makes a scheduler with some of the configuration's profiles, which is never run. What was started with it
// ends with stop.
func makeProfiles(
	ctx context.Context, cfg *schedulerconfig.KubeSchedulerConfiguration, profiles []schedulerconfig.KubeSchedulerProfile,
) (made profile.Map, stop func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	nobody := &rest.Config{Host: "http://nobody.invalid", Transport: unreachable{}}
	client, err := kubernetes.NewForConfig(nobody)
	if err != nil {
		return nil, cancel, err
	}
	recorders := events.NewBroadcaster(&events.EventSinkImpl{Interface: client.EventsV1()})
	sched, err := scheduler.New(ctx, client, informers.NewSharedInformerFactory(client, 0), nil,
		func(name string) events.EventRecorderLogger { return recorders.NewRecorder(clientscheme.Scheme, name) },
		scheduler.WithComponentConfigVersion(cfg.APIVersion),
		scheduler.WithKubeConfig(nobody),
		scheduler.WithProfiles(profiles...),
		scheduler.WithPercentageOfNodesToScore(cfg.PercentageOfNodesToScore),
		scheduler.WithFrameworkOutOfTreeRegistry(plugins.NewRegistry()),
		scheduler.WithExtenders(cfg.Extenders...),
		scheduler.WithParallelism(cfg.Parallelism),
	)
	if err != nil {
		return nil, func() { cancel(); recorders.Shutdown() }, err
	}
	return sched.Profiles, func() {
		cancel()
		recorders.Shutdown()
		_ = sched.Profiles.Close() // nothing was run that could be left behind
	}, nil
}

// unreachable is a network without an API server.
type unreachable struct{}

func (unreachable) RoundTrip(*http.Request) (*http.Response, error) {
	return nil, errors.New("a configuration is checked without a cluster")
}
