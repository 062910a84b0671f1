// Drives the thread team and the scalar kernel for the sanitizers: callers in turn, jobs of any size, teams that end.
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "kernel.h"
#include "team.h"

namespace {

constexpr int kTeams = 20, kCallers = 4, kJobs = 60;

bool every_chunk_once(cpu_adam::Team& team, std::size_t num_chunks) {
    std::vector<int> seen(num_chunks, 0);
    team.run(num_chunks, [&](std::size_t chunk) { ++seen[chunk]; });
    for (const int times : seen) {
        if (times != 1) return false;
    }
    return true;
}

bool callers_take_turns() {
    for (int number = 0; number < kTeams; ++number) {
        const auto team = cpu_adam::Team::start(4, {0, 1});
        std::vector<std::thread> callers;
        std::vector<int> good(kCallers, 1);
        for (int caller = 0; caller < kCallers; ++caller) {
            callers.emplace_back([&, caller] {
                for (std::size_t job = 0; job < kJobs; ++job) {
                    if (!every_chunk_once(*team, job * 7 % 50)) good[caller] = 0;
                }
            });
        }
        for (auto& caller : callers) caller.join();
        for (const int one : good) {
            if (!one) return false;
        }
    }
    return true;
}

// Every format over arrays that end where their memory ends, and begin at odd addresses.
void update_to_the_last_byte() {
    using namespace cpu_adam;
    const AdamScalars scalars = {0.5f, 0.99f, 0.01f, 0.999f, 0.1f, 0.001f, 0.03f, 1e-8f, -1e-3f};
    for (const MasterFormat master : {MasterFormat::fp32, MasterFormat::split_bf16, MasterFormat::fp32_out_bf16,
                                      MasterFormat::fp32_out_fp16}) {
        for (const GradFormat grad : {GradFormat::fp32, GradFormat::bf16, GradFormat::fp16}) {
            for (std::size_t length = 0; length < 40; ++length) {
                std::vector<float> weights(length), first(length), second(length), gradient(length), wide(length);
                std::vector<std::int16_t> low(length);
                std::vector<std::uint16_t> out(length);
                const Arrays arrays = {weights.data(), low.data(), out.data(), {first.data(), second.data()}, gradient.data()};
                kScalar.adam(master, grad)(arrays, scalars, 0, length);
                kScalar.adam_traffic(master, grad)(arrays, 0, 0, length);
                double lanes[kLanes] = {};
                kScalar.squares(grad)(gradient.data(), 0, length, lanes);
                kScalar.arrival(GradFormat::fp32, grad)(wide.data(), gradient.data(), 0, length, lanes);
            }
        }
    }
}

}  // namespace

int main() {
    update_to_the_last_byte();
    return callers_take_turns() ? 0 : 1;
}
